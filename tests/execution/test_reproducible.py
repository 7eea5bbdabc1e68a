"""With ``reproducible_rng`` random numbers are the same for every degree of parallelism."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.ranks import outputs_of_ranks

PROGRAM = Path(__file__).with_name("reproducible_program.py")
#: Cuts inside a sequential, between a block's children, and around the checkpointed block.
CUTS = {"blocks.1": 1, "blocks.2.second": 1, "blocks.3.attention": 1, "tail.2": 1, "tail.3": 1}


def train(ranks: int, pp: int, microbatches: int, pins: dict[str, int] | None = None) -> dict[str, Any]:
    """Losses of the job's microbatches, in order of samples, and the norms of all gradients."""
    outputs = outputs_of_ranks(PROGRAM, str(pp), str(microbatches), json.dumps(pins or {}), ranks=ranks)
    rows = [json.loads(output.splitlines()[-1]) for output in outputs]
    if pp > 1:
        assert sum(bool(row["norms"]) for row in rows) == ranks, "some rank holds nothing"
    by_replica = {row["replica"]: row["losses"] for row in rows}
    replicas = [by_replica[replica] for replica in sorted(by_replica)]
    losses = [[loss for part in step for loss in part] for step in zip(*replicas, strict=True)]
    return {"losses": losses, "norms": {name: norm for row in rows for name, norm in row["norms"].items()}}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    found = train(1, 1, 4)
    assert len({loss for step in found["losses"] for loss in step}) == 8, "random numbers repeat"
    return found


@pytest.mark.parametrize(
    ("ranks", "pp", "microbatches", "pins"),
    [(2, 2, 4, None), (2, 2, 4, CUTS), (3, 3, 4, None), (2, 1, 2, None), (4, 2, 2, CUTS)],
    ids=["pipeline", "pipeline with many cuts", "pipeline of three", "replicas", "replicas of pipelines"],
)
def test_every_degree_draws_the_same(
    alone: dict[str, Any], ranks: int, pp: int, microbatches: int, pins: dict[str, int] | None
) -> None:
    found = train(ranks, pp, microbatches, pins)
    for ours, theirs in zip(found["losses"], alone["losses"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12)
    assert found["norms"].keys() == alone["norms"].keys()
    for name, norm in found["norms"].items():
        assert norm == pytest.approx(alone["norms"][name], rel=1e-10), name
