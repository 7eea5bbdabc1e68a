"""Lightning over ranks is Lightning in one process; ``make trainers`` runs more kinds and layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from shardwright.lightning import ShardwrightStrategy

from tests.jobs.ranks import outputs_of_ranks, run_ranks, told
from tests.trainers.runs import BAR, ROOT, compare_lightning, run


@pytest.mark.parametrize(
    ("kind", "layout"), [("lightning-gpt2", "pp2"), pytest.param("lightning-vit", "pp2xdp2", marks=pytest.mark.slow)]
)
def test_losses_metrics_and_resumed_trainings_are_exact(kind: str, layout: str) -> None:
    (plain,) = run(kind, "plain", "float64")
    outcome = compare_lightning(layout, plain, run(kind, layout, "float64"))
    assert not outcome.problems
    assert outcome.difference <= BAR, outcome.of


@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_the_rest_of_the_interface(ranks: int, tmp_path: Path) -> None:
    """What `lightning_checks.py` lists, in one process and over ranks, an odd number of them too."""
    first, *_ = outputs_of_ranks(
        "-m", "tests.trainers.lightning_checks", str(ranks), str(tmp_path), ranks=ranks, folder=ROOT
    )
    assert json.loads(first.splitlines()[-1])["checks"] >= 15


@pytest.mark.parametrize(
    "config",
    [
        {"ddp": True, "shard_optimizer_state": True},
        pytest.param({"ddp": True, "sharded_data_parallel_degree": 2}, marks=pytest.mark.slow),
        pytest.param({"ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": True}, marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel_degree": 2, "static_mode": True, "fast_mode": True}, marks=pytest.mark.slow),
    ],
    ids=["optimizer shards", "parameter shards", "prescaled", "static"],
)
def test_other_keys_train_alike(config: dict[str, Any], tmp_path: Path) -> None:
    first, *_ = outputs_of_ranks(
        "-m", "tests.trainers.lightning_keys", str(tmp_path), json.dumps(config), ranks=2, folder=ROOT
    )
    told = json.loads(first.splitlines()[-1])
    assert told["losses"] == pytest.approx(told["expected"], rel=1e-9)


@pytest.mark.parametrize("where", ["step", "hook"])
def test_an_error_on_one_rank_ends_all(where: str) -> None:
    ended = run_ranks("-m", "tests.trainers.lightning_fails", where, ranks=4, folder=ROOT)
    assert all(one.code for one in ended)
    assert any(f"ValueError: in the {where}" in one.err for one in ended), told(ended)
    assert all(f"in the {where}" in one.err or "PeerLostError" in one.err for one in ended)


def test_it_is_refused_in_a_process_that_is_no_rank() -> None:
    with pytest.raises(MisconfigurationException, match=r"before .smp\.init"):
        ShardwrightStrategy()
