"""Tensor parallelism with pipelines and data parallelism: exact, in one order, and with an error where ranks part."""

import re
from pathlib import Path

import pytest

from tests.jobs.ranks import outputs_of_ranks

PROGRAM = Path(__file__).with_name("job.py")
SCHEDULES = ("delays", "looped", "zero_bubble", "static", "fast")


@pytest.mark.parametrize(
    ("ranks", "pipeline", "scenarios", "own"),
    [
        (2, 1, ("plain", "fails"), "DistributedLinear '2.divided'"),
        (4, 1, ("plain", "joins"), ""),
        (4, 2, (*SCHEDULES, "fails"), "calls forward of Sequential"),
    ],
)
def test_every_step_is_that_of_one_process(ranks: int, pipeline: int, scenarios: tuple[str, ...], own: str) -> None:
    """Whatever the schedule and the delays; ranks that take other branches are told where, and go on exactly."""
    for output in outputs_of_ranks(PROGRAM, str(pipeline), "2", *scenarios, ranks=ranks):
        lines = output.splitlines()
        assert [line.partition(":")[0] for line in lines if ": exact with" in line] == list(scenarios)
        refused = [line for line in lines if line.startswith("refused: ")]
        assert len(refused) == scenarios.count("fails")
        for line in refused:
            assert "DistributedLinear '1.divided'" in line
            assert own in line


@pytest.mark.parametrize(
    ("ranks", "pipeline", "back_end"), [(2, 1, "messages"), (4, 2, "messages"), (2, 1, "process_group")]
)
def test_known_shapes_are_not_waited_for(ranks: int, pipeline: int, back_end: str) -> None:
    """Nobody waits for what is known; a rank that brings or calls something else later is refused by name."""
    for output in outputs_of_ranks(PROGRAM.with_name("known.py"), str(pipeline), back_end, ranks=ranks):
        changed, skipped, last = output.splitlines()[-3:]
        assert last == "exact"
        assert re.match(
            r"refused: .*DistributedLinear '\d.divided': shapes have to be the same on all tp ranks", changed
        )
        assert re.match(r"refused: .*DistributedLinear '1.divided'", skipped)


@pytest.mark.parametrize("mode", ["dynamic", "fast"])
def test_ranks_keep_one_order_whenever_each_collects_garbage(mode: str) -> None:
    """A result that only garbage refers to is fetched at the end of a task on one rank, and released on the other."""
    for output in outputs_of_ranks(PROGRAM.with_name("garbage.py"), mode, ranks=4):
        assert output.splitlines()[-2:] == ["exact with width 8", "exact with width 64"]


def test_batches_have_different_sizes() -> None:
    """No rank of a TP_GROUP waits more often than the others, however large its results are."""
    for output in outputs_of_ranks(PROGRAM.with_name("unequal.py"), "dynamic", ranks=4):
        assert output.splitlines()[-1] == "exact with 0 steps run again"


@pytest.mark.parametrize("mode", ["static", "fast"])
def test_static_mode_runs_steps_again_in_which_only_one_rank_knows_the_calls(mode: str) -> None:
    """A rank that waits for a call's result, which the others predict, would give up the turn when they do not."""
    outputs = outputs_of_ranks(PROGRAM.with_name("unequal.py"), mode, ranks=4)
    (last,) = {output.splitlines()[-1] for output in outputs}
    found = re.fullmatch(r"exact with (\d+) steps run again", last)
    assert found
    assert int(found[1]) >= 3


@pytest.mark.parametrize("pipeline", ["zero_bubble", "auto"])
def test_pipelines_take_one_schedule_whatever_each_measures(pipeline: str) -> None:
    """Pipelines of tensor-parallel ranks that run their tasks in different orders wait for one another."""
    for output in outputs_of_ranks(PROGRAM.with_name("measured.py"), pipeline, ranks=4):
        assert output.splitlines()[-1] == "exact under the first pipeline's choice"


def test_the_step_after_a_failed_one_is_exact() -> None:
    """What a failed step had left for later on one rank only does not part the next one."""
    for output in outputs_of_ranks(PROGRAM.with_name("after_failure.py"), ranks=4):
        assert output.splitlines()[-1] == "exact after failed steps"
