"""Which elements dropout takes depends on what is asked, not on degrees, divided modules, evaluations or failures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.jobs.ranks import outputs_of_ranks

PROGRAM = Path(__file__).with_name("masks_program.py")
COUNT = 6
Losses = dict[tuple[int, bool], list[list[float]]]


def train(ranks: int, pp: int, tp: int, *, prescaled: bool = False) -> Losses:
    """By drawn program and whether there were evaluations, the losses of each step, in order of samples."""
    outputs = outputs_of_ranks(PROGRAM, *map(str, (pp, tp, int(prescaled), COUNT)), ranks=ranks)
    rows = [[json.loads(line) for line in output.splitlines()] for output in outputs]
    found: Losses = {}
    for same in zip(*rows, strict=True):
        # One rank of each group that has the same samples; the others have to agree with it.
        distinct = {json.dumps(row["losses"]): row["losses"] for row in same}
        assert len(distinct) == (1 if prescaled else tp)
        steps = zip(*distinct.values(), strict=True)
        found[same[0]["program"], same[0]["looks"]] = [[loss for part in step for loss in part] for step in steps]
    return found


@pytest.fixture(scope="module")
def alone() -> Losses:
    found = train(1, 1, 1)
    losses = [loss for (_, looks), steps in found.items() for step in steps for loss in step if not looks]
    assert len(set(losses)) == len(losses), "random numbers repeat"
    return found


def test_evaluations_and_failed_steps_take_nothing_from_training(alone: Losses) -> None:
    for program in range(COUNT):
        assert alone[program, True] == alone[program, False]


@pytest.mark.parametrize(
    ("pp", "tp", "prescaled"),
    [(2, 1, False), (1, 2, True), (1, 2, False), (2, 2, True)],
    ids=["pipeline", "divided, same samples", "divided, own samples", "divided in a pipeline"],
)
def test_every_degree_drops_the_same(alone: Losses, pp: int, tp: int, prescaled: bool) -> None:
    found = train(pp * tp, pp, tp, prescaled=prescaled)
    for key, steps in alone.items():
        for ours, theirs in zip(found[key], steps, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-12), key
