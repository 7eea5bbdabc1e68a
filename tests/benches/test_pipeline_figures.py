"""The ideals of ``make bench-pipeline``, which the simulator computes, and its bars."""

from __future__ import annotations

import pytest
from shardwright import _core

from benches.pipeline.figures import Row
from benches.pipeline.ideal import StageCosts, policy_makespan, program_makespan

MICROBATCHES = 8


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", ["simple", "interleaved"])
def test_costs_are_seconds_and_a_backward_is_both_its_parts(schedule: str, num_ranks: int) -> None:
    costs = [StageCosts(0.01, 0.02, 0.03)] * num_ranks
    program = _core.reference_program(schedule, ranks=num_ranks, microbatches=MICROBATCHES)
    assert program_makespan(program, costs) == pytest.approx(0.06 * (MICROBATCHES + num_ranks - 1))
    # The policy's own order may take longer: a backward waits for the root's turn.
    ideal = policy_makespan(range(num_ranks), costs, MICROBATCHES, "simple", num_ranks + 2)
    assert ideal == pytest.approx(0.06 * (MICROBATCHES + num_ranks - 1))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_weight_gradients_fill_the_bubble(num_ranks: int) -> None:
    costs = [StageCosts(0.01, 0.01, 0.01)] * num_ranks
    whole, split = (
        policy_makespan(range(num_ranks), costs, MICROBATCHES, policy, MICROBATCHES)
        for policy in ("interleaved", "zero_bubble")
    )
    assert 0.03 * MICROBATCHES < split < whole


def test_a_schedule_that_the_library_lacks_misses_its_bar() -> None:
    row = Row(
        ranks=2,
        unit_ms=1.0,
        costs="even",
        schedule="zero_bubble",
        ours=None,
        ours_ideal=0.025,
        torch=0.05,
        torch_ideal=0.025,
    )
    assert row.missed() == ["the library has no such schedule"]
    assert row.as_json()["ours"] is None


def test_a_row_has_to_beat_torch_in_fraction_and_in_time() -> None:
    row = Row(
        ranks=2,
        unit_ms=40.0,
        costs="even",
        schedule="interleaved",
        ours=1.10,
        ours_ideal=1.08,
        torch=1.05,
        torch_ideal=1.04,
    )
    assert [clause.partition(",")[0] for clause in row.missed()] == ["0.982 of the ideal", "1.048 of torch's time"]
