"""Ranks that hold the same parameters have to train the same ones."""

from pathlib import Path

import pytest

from tests.jobs.ranks import outputs_of_ranks

PROGRAM = Path(__file__).with_name("frozen.py")
NAMES = ("0.weight", "1.weight", "2.bias")


@pytest.mark.parametrize(("ranks", "pipeline", "tensor", "kind"), [(2, 1, 1, "dp"), (2, 1, 2, "tp"), (4, 2, 2, "tp")])
def test_parameters_frozen_on_some_ranks_are_refused_on_all(ranks: int, pipeline: int, tensor: int, kind: str) -> None:
    expected = [
        f"refused: smp.DistributedModel: all {kind} ranks have to train the same parameters, but {name!r} is frozen "
        f"(requires_grad=False) on {kind} ranks [{frozen}] and trained on {kind} ranks [{1 - frozen}]"
        for frozen in (1, 0)
        for name in NAMES
    ]
    for output in outputs_of_ranks(PROGRAM, str(pipeline), str(tensor), ranks=ranks):
        assert [line for line in output.splitlines() if line.startswith("refused: ")] == expected
