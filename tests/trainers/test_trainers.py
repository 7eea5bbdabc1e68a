"""Trainer over ranks is Trainer in one process; ``make trainers`` runs all kinds and layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.ranks import outputs_of_ranks
from tests.trainers.runs import BAR, ROOT, compare, run

CHECKS = "tests.trainers.checks"


def trained_with(folder: Path, ranks: int, **config: Any) -> list[dict[str, float]]:
    """Losses and norms of a job with these keys, which has resumed exactly."""
    first, *_ = outputs_of_ranks(
        "-m", "tests.trainers.keys", str(folder / "out"), json.dumps(config), ranks=ranks, folder=ROOT
    )
    told = json.loads(first.splitlines()[-1])
    assert told["resumed"] == told["log"]
    assert len(told["log"]) == 4
    return [{key: entry[key] for key in ("loss", "grad_norm")} for entry in told["log"]]


@pytest.mark.parametrize(
    ("config", "bar"),
    [
        ({"pipeline_parallel_degree": 2, "bf16": True}, 3e-2),
        pytest.param({"pipeline_parallel_degree": 2, "fp16": True}, 1e-2, marks=pytest.mark.slow),
        ({"ddp": True, "shard_optimizer_state": True}, 1e-5),
        pytest.param({"ddp": True, "sharded_data_parallel_degree": 2}, 1e-5, marks=pytest.mark.slow),
        pytest.param({"ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": True}, 1e-5, marks=pytest.mark.slow),
    ],
    ids=["bf16", "fp16", "optimizer shards", "parameter shards", "prescaled"],
)
def test_other_keys_train_alike(config: dict[str, Any], bar: float, tmp_path: Path) -> None:
    alone = trained_with(tmp_path / "alone", 1)
    for ours, theirs in zip(trained_with(tmp_path / "ranks", 2, **config), alone, strict=True):
        assert ours == pytest.approx(theirs, rel=bar)


@pytest.mark.parametrize(("kind", "layout"), [("t5", "pp2"), pytest.param("gpt2", "pp2xdp2", marks=pytest.mark.slow)])
def test_losses_metrics_and_resumed_trainings_are_exact(kind: str, layout: str) -> None:
    (plain,) = run(kind, "plain", "float64")
    outcome = compare(layout, plain, run(kind, layout, "float64"))
    assert not outcome.problems
    assert outcome.difference <= BAR, outcome.of


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_rest_of_the_interface(ranks: int, tmp_path: Path) -> None:
    """What `checks.py` lists, in one process and over ranks, an odd number of them too."""
    first, *_ = outputs_of_ranks("-m", CHECKS, str(ranks), str(tmp_path), ranks=ranks, folder=ROOT)
    assert json.loads(first.splitlines()[-1])["checks"] >= 10
