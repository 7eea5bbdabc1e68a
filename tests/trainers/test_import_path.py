"""transformers' Trainer on its path for the original library; ``make trainers`` runs more kinds and layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainers.import_path import ended_ranks, outputs_of
from tests.trainers.runs import BAR, compare, run

_SETTINGS = {"microbatches": 2, "deterministic_server": True}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("smp-gpt2", "pp2"),
        pytest.param("smp-gpt2", "pp2xdp2", marks=pytest.mark.slow),
        pytest.param("smp-gpt2", "tp2", marks=pytest.mark.slow),
    ],
)
def test_losses_metrics_and_resumed_trainings_are_exact(kind: str, layout: str) -> None:
    (plain,) = run(kind, "plain", "float64")
    outcome = compare(layout, plain, run(kind, layout, "float64"))
    assert not outcome.problems
    assert outcome.difference <= BAR, outcome.of


@pytest.mark.parametrize(
    ("ranks", "keys"),
    [
        pytest.param(1, {"partitions": 1}, marks=pytest.mark.slow),
        (2, {"partitions": 2}),
        pytest.param(3, {"partitions": 1, "ddp": True}, marks=pytest.mark.slow),
    ],
)
def test_the_rest_of_the_interface(ranks: int, keys: dict[str, Any], tmp_path: Path) -> None:
    first, *_ = outputs_of(
        "tests.trainers.original_checks",
        str(ranks),
        str(tmp_path),
        parameters={**_SETTINGS, **keys},
        ranks=ranks,
    )
    assert json.loads(first.splitlines()[-1])["checks"] >= 10


def trained_with(folder: Path, ranks: int, keys: dict[str, Any]) -> list[dict[str, float]]:
    """Losses and norms of a job with these keys, which has resumed exactly."""
    command = ("tests.trainers.keys", str(folder / "out"), json.dumps({"partitions": 1, **keys}))
    first, *_ = outputs_of(*command, parameters={**_SETTINGS, "partitions": 1, **keys}, ranks=ranks)
    told = json.loads(first.splitlines()[-1])
    assert told["resumed"] == told["log"]
    assert len(told["log"]) == 4
    return [{key: entry[key] for key in ("loss", "grad_norm")} for entry in told["log"]]


@pytest.mark.parametrize(
    ("keys", "bar"),
    [
        ({"partitions": 2, "bf16": True}, 3e-2),
        pytest.param({"partitions": 2, "fp16": True}, 1e-2, marks=pytest.mark.slow),
        pytest.param({"ddp": True, "shard_optimizer_state": True}, 1e-5, marks=pytest.mark.slow),
        pytest.param({"ddp": True, "sharded_data_parallel_degree": 2}, 1e-5, marks=pytest.mark.slow),
    ],
    ids=["bf16", "fp16", "optimizer shards", "parameter shards"],
)
def test_other_keys_train_alike(keys: dict[str, Any], bar: float, tmp_path: Path) -> None:
    alone = trained_with(tmp_path / "alone", 1, {})
    for ours, theirs in zip(trained_with(tmp_path / "ranks", 2, keys), alone, strict=True):
        assert ours == pytest.approx(theirs, rel=bar)


@pytest.mark.parametrize(
    ("rank", "where"),
    [
        (1, "data"),
        pytest.param(0, "data", marks=pytest.mark.slow),
        pytest.param(0, "callback", marks=pytest.mark.slow),
        pytest.param(1, "metrics", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_ends_all_and_is_named(rank: int, where: str, tmp_path: Path) -> None:
    ended = ended_ranks(
        "tests.trainers.original_failing",
        str(rank),
        where,
        str(tmp_path),
        parameters={**_SETTINGS, "partitions": 2},
        ranks=2,
    )
    assert all(one.code for one in ended), [one.code for one in ended]
    assert "this rank is told to fail" in ended[rank].err
    assert f"rank {rank}" in ended[1 - rank].err
    assert "this rank is told to fail" in ended[1 - rank].err
