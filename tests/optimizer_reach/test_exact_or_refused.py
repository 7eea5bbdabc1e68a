"""Optimizers that look at whole parameters train divided ones as one process does, or are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.jobs.listed import run_in_job

from .optimizers import OPTIMIZERS

TENSOR = {"tensor_parallel_degree": 2}
SHARDS = {
    "sharded_data_parallel_degree": 2,
    "sdp_param_persistence_threshold": 10,
    "sdp_gradient_clipping": 1e9,
}
#: Look at whole parameters where no trial sees it.
HIDDEN = ["late", "large", "switched", "attribute"]
#: Exchange norms themselves, which shards do not allow.
FUSED = ["fused-lamb", "fused-novograd"]
#: Those that look at no more than a parameter, and draw no numbers.
OF_A_PARAMETER = [
    name
    for name in OPTIMIZERS
    if name not in ("clipped", "noisy", "keeps", "lbfgs", "muon", "wrongly", *FUSED, *HIDDEN)
]


Case = tuple[str, dict[str, Any]]


def case(name: str, optimizer: str, **arguments: Any) -> Case:
    return name, {"optimizer": optimizer, **arguments}


def run(ranks: int, config: dict[str, Any], cases: list[Case]) -> None:
    run_in_job("tests.optimizer_reach.rank", ranks, [{"config": config, "cases": cases}])


NARROW = [case("narrow", "adafactor", outputs=outputs) for outputs in (1, 2, 3)]
EXACT = [case("exact", "muon", bias=False), *(case("exact", name, bias=True) for name in OF_A_PARAMETER)]


def test_over_tensor_parallel_ranks(tmp_path: Path) -> None:
    cases = [
        *EXACT,
        *(case("hidden", name, bias=True) for name in HIDDEN),
        *NARROW[1:2],
        case("refused", "wrongly", bias=True, words="Wrongly declares updates_elements_independently = True"),
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
    run(4, {**TENSOR, **more}, [*EXACT, case("hidden", "late", bias=True), *(refused if more else ())])


def test_parts_in_chunks_are_of_what_is_known_or_declared() -> None:
    cases = [
        case("exact", "mine", bias=True),
        case("exact", "declared", bias=True),
        case("refused", "late", bias=True, words="Unseen is not known to update each element.*set updates_el"),
    ]
    run(2, {**TENSOR, "offload_optimizer": "disk"}, cases)


def test_over_shards(tmp_path: Path) -> None:
    cases = [
        *EXACT,
        *(case("hidden", name, bias=True) for name in HIDDEN),
        case("exact", "clipped", bias=True),
        *NARROW,
        case("saved", "adafactor", bias=True, folder=str(tmp_path / "adafactor")),
        case("refused", "noisy", bias=True, words="Noisy draws random numbers"),
        case("refused", "keeps", bias=True, words="Keeps is not known to update each parameter by itself"),
        case("refused", "lbfgs", bias=False, words="LBFGS does not update each parameter by itself"),
    ]
    run(2, SHARDS, cases)


def test_norms_are_those_of_the_weights_that_became_one(tmp_path: Path) -> None:
    optimizers = ["fused-lamb", "fused-novograd", "lars", "attribute"]
    run(2, TENSOR, [("of_weights", {"optimizers": optimizers, "folder": str(tmp_path)})])


def test_a_step_that_is_replaced_calls_the_one_before() -> None:
    run(2, {"shard_optimizer_state": True}, [("replaced", {"optimizer": "adamw"})])
