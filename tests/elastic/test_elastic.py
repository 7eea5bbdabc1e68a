"""A job that loses a rank goes on with fewer, as if its checkpoint had been resharded by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.elastic.__main__ import BAR
from tests.elastic.rank import example
from tests.elastic.runs import (
    Trained,
    by_hand,
    lost_and_repeated,
    under_torchrun,
    without_launcher,
    worst_relative_error,
)

SMALL = ("--steps", "9", "--save-every", "3", "--pipeline-parallel-degree", "3", "--layers", "3")


def test_a_job_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    """Three stages become two; the steps after the newest checkpoint are done again."""
    run = without_launcher(tmp_path, 3, 5, *SMALL)
    first, last = run.starts
    assert (first["from_step"], first["ranks"], first["stages"]) == (0, 3, 3)
    assert (last["from_step"], last["ranks"], last["stages"]) == (3, 2, 2)
    assert len(run.losses) == 9
    assert lost_and_repeated(run, 9) == (0, 0)
    assert worst_relative_error(run, by_hand(tmp_path, run, *SMALL)) <= BAR


@pytest.mark.slow
def test_a_node_lost_right_after_a_save_in_the_background_does_not_keep_the_job(tmp_path: Path) -> None:
    """Of two agents one is killed with its rank, which has written nothing: the other goes on from the save before.

    It takes a minute: agents that have fewer nodes than they may have wait for more.
    """
    sizes = ("--steps", "9", "--save-every", "3", "--layers", "3")
    run = under_torchrun(tmp_path, 2, "saved 6", *sizes, fewest=1)
    first, last = run.starts
    assert (first["from_step"], first["ranks"], first["stages"]) == (0, 2, 2)
    assert (last["from_step"], last["ranks"], last["stages"]) == (3, 1, 1)
    assert len(run.losses) == 9
    assert lost_and_repeated(run, 9) == (0, 0)
    assert worst_relative_error(run, by_hand(tmp_path, run, *sizes)) <= BAR


def test_an_epoch_has_each_sample_once() -> None:
    """Whatever the batches are, and each epoch in another order."""
    module = example()
    several = [one for start in range(0, 2400, 24) for one in module.samples_from(start, 24)]
    epochs = [several[:1000], several[1000:2000]]
    assert [sorted(epoch) for epoch in epochs] == [list(range(1000))] * 2
    assert epochs[0] != epochs[1]
    assert module.samples_from(950, 2000) == [*several[950:2400], *module.samples_from(2400, 550)]


def test_samples_are_counted() -> None:
    samples = example().samples_from(0, 48)
    assert lost_and_repeated(Trained([], [1.0, 1.0], [*samples[:-1], samples[0]]), 2) == (1, 1)
    assert lost_and_repeated(Trained([], [1.0], samples[:24]), 2) == (24, 0)
