"""The parts of ``make bench-gpt2`` that measure nothing: what it compares and demands."""

from __future__ import annotations

import pytest

from benches.gpt2.figures import Measured, disagreements, figures, table

LOSSES = [9.0, 8.5]


def _groups() -> list[dict[str, Measured]]:
    return [
        {
            "single": Measured([8.0, 8.0], LOSSES),
            "halves": Measured([4.0, 8.0], [9.0, 8.9]),
            "torch/1f1b/5-3": Measured([5.0, 10.0], LOSSES, [1000, 2000]),
            "torch/1f1b/4-4": Measured([5.5, 11.0], LOSSES),
            "ours/interleaved/auto": Measured([5.2, 10.4], LOSSES, [3000, 3000]),
            "ours/interleaved/010101010": Measured([4.5, 9.0], LOSSES, [2040, 1000]),
        },
        {
            # On a slower hour: only what ran beside it counts.
            "halves": Measured([8.0], [9.0, 8.9]),
            "torch/1f1b/5-3": Measured([10.0], LOSSES, [1000, 2000]),
            "ours/simple/auto": Measured([8.8], LOSSES),
        },
    ]


def test_the_fastest_of_each_group_is_compared_round_by_round_and_above_one_is_faster() -> None:
    assert figures(_groups()) == {
        "vs_torch_1f1b": pytest.approx(10.0 / 8.8),
        "vs_half_batches": pytest.approx(8.0 / 8.8),
        "interleaved_vs_torch_1f1b": pytest.approx(5.0 / 4.5),
        "memory_vs_torch_1f1b": pytest.approx(1.02),
        "vs_torch_best": None,
        "memory_vs_torch_best": None,
    }


def test_the_fastest_is_compared_with_the_fastest_of_torch_where_its_zero_bubble_runs() -> None:
    group = {
        "torch/1f1b/5-3": Measured([5.0, 6.0], LOSSES, [1000, 2000]),
        "torch/zero_bubble/5-3": Measured([4.4, 4.4], LOSSES, [3000, 2000]),
        "ours/zero_bubble/auto/4": Measured([4.0, 4.0], LOSSES, [2000, 3300]),
        "ours/interleaved/auto/2": Measured([4.3, 4.3], LOSSES, [1000, 1000]),
    }
    found = figures([*_groups(), group])
    assert found["vs_torch_best"] == pytest.approx(1.1)
    assert found["memory_vs_torch_best"] == pytest.approx(1.1)
    group["torch/1f1b/5-3"].seconds = [2.0, 2.0]
    found = figures([group])
    assert (found["vs_torch_best"], found["memory_vs_torch_best"]) == (pytest.approx(0.5), pytest.approx(2.0))


def test_memory_is_of_configurations_that_had_their_processes_for_themselves() -> None:
    groups = _groups()
    groups[0]["ours/interleaved/010101010"].peak_bytes = None
    assert figures(groups)["memory_vs_torch_1f1b"] == pytest.approx(3.0)


def test_what_could_not_be_compared_has_no_figure() -> None:
    assert set(figures([{"halves": Measured([8.0])}]).values()) == {None}


def test_the_table_has_a_line_for_each_configuration_of_each_group() -> None:
    lines = table(_groups(), ["ours/none"]).splitlines()
    assert len([line for line in lines if line]) == 1 + 6 + 3 + 1
    assert lines[6].split() == ["ours/interleaved/010101010", "6.750", "1.111", "0.889", "0/0"]


def test_a_loss_of_the_second_step_that_is_off_is_named_except_of_independent_halves() -> None:
    group = _groups()[1]
    group["ours/simple/auto"].losses = [9.0005, 8.51]
    assert disagreements(group, LOSSES) == ["wrong: ours/simple/auto has a loss of 8.510000 in step 2, not 8.500000"]


def test_a_loss_that_is_no_number_is_wrong() -> None:
    group = _groups()[0]
    group["halves"].losses = [float("nan")]
    assert len(disagreements(group, LOSSES)) == 1
