"""Optimizers that look at whole parameters train divided ones as one process does, or are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.jobs.listed import run_in_job

from .optimizers import OPTIMIZERS

TENSOR = {"tensor_parallel_degree": 2}
#: Those that look at no more than a parameter, and draw no numbers.
OF_A_PARAMETER = [name for name in OPTIMIZERS if name not in ("clipped", "noisy", "keeps", "lbfgs", "muon")]


Case = tuple[str, dict[str, Any]]


def case(name: str, optimizer: str, **arguments: Any) -> Case:
    return name, {"optimizer": optimizer, **arguments}


def run(ranks: int, config: dict[str, Any], cases: list[Case]) -> None:
    run_in_job("tests.optimizer_reach.rank", ranks, [{"config": config, "cases": cases}])


EXACT = [case("exact", "muon", bias=False), *(case("exact", name, bias=True) for name in OF_A_PARAMETER)]


def test_over_tensor_parallel_ranks(tmp_path: Path) -> None:
    cases = [
        *EXACT,
        case("saved", "muon", bias=False, folder=str(tmp_path / "muon")),
        case("saved", "adafactor", bias=True, folder=str(tmp_path / "adafactor")),
        case("exact", "clipped", bias=False),
        case("refused", "noisy", bias=True, words="Noisy draws random numbers"),
        case("refused", "keeps", bias=True, words="Keeps is not known to update each parameter by itself"),
        case("refused", "clipped", bias=True, words="Clipped does not update each parameter by itself"),
        case("refused", "lbfgs", bias=False, words="LBFGS does not update each parameter by itself"),
        case("unwrapped", "muon"),
        case("unwrapped", "lars"),
        case("early", "mine", wraps=True),
        case("early", "mine", wraps=False),
    ]
    run(2, TENSOR, cases)


@pytest.mark.parametrize(
    "more",
    [{}, {"shard_optimizer_state": True}, {"pipeline_parallel_degree": 2}],
    ids=["replicas", "shares", "pipeline"],
)
def test_over_four_ranks(more: dict[str, Any]) -> None:
    refused = [
        case("refused", "clipped", bias=False, words="Clipped does not update each parameter"),
        case("refused", "noisy", bias=False, words="Noisy draws random numbers"),
    ]
    run(4, {**TENSOR, **more}, [*EXACT, *(refused if more else ())])
