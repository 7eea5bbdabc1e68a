"""Training with sharded optimizer state is that of plain PyTorch in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.jobs.ranks import run_ranks
from tests.optimizer_sharding.problems import OPTIMIZERS
from tests.optimizer_sharding.running import PIPELINE, TENSOR, case, run


@pytest.mark.parametrize("model", ["odd", "large"])
def test_two_ranks_train_as_one_process(model: str) -> None:
    run(2, *(case("parity", model=model, optimizer=optimizer) for optimizer in OPTIMIZERS))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_models_with_few_and_special_parameters(ranks: int) -> None:
    models = ("tiny", "tied", "scalars")
    run(ranks, *(case("parity", model=model, optimizer=each) for model in models for each in ("sgd", "adafactor")))


def test_three_ranks_train_as_one_process() -> None:
    run(3, *(case("parity", model="large", optimizer=each) for each in ("sgd", "adamw", "adafactor")))


def test_pipelines_with_replicas_train_as_one_process() -> None:
    models, optimizers = ("odd", "large", "tiny"), ("sgd", "adamw", "adafactor")
    run(4, *(case("parity", PIPELINE, model=model, optimizer=each) for model in models for each in optimizers))
    for config in ({"deterministic_server": True}, {"pipeline": "zero_bubble"}, {"placement_strategy": "spread"}):
        run(4, case("parity", {**PIPELINE, **config}, model="large", optimizer="adamw"))


def test_tensor_parallel_modules_train_as_one_process() -> None:
    run(4, *(case("tensor_parallel", TENSOR, optimizer=each) for each in ("sgd", "adamw", "adagrad")))
    run(2, case("tensor_parallel", TENSOR, optimizer="adamw"))
    for config in ({"prescaled_batch": True}, {"optimize": "speed"}):
        run(4, case("tensor_parallel", {**TENSOR, **config}, optimizer="adamw"))


def test_tensor_parallel_pipelines_train_as_one_process() -> None:
    run(4, case("tensor_parallel", {**TENSOR, **PIPELINE}, optimizer="adamw"))


def test_state_is_a_share_of_that_of_one_process() -> None:
    optimizers = ("sgd", "adam", "adamw", "adagrad", "rmsprop")
    for ranks in (2, 3):
        run(ranks, *(case("half_the_bytes", model=m, optimizer=each) for m in ("odd", "large") for each in optimizers))


def test_shares_that_cannot_be_even_are_told_once() -> None:
    cases = [case("parity", model="large", optimizer=each, steps=3) for each in ("adafactor", "adamw")]
    ended = run_ranks("-m", "tests.optimizer_sharding.rank", json.dumps(cases), ranks=2)
    assert [each.code for each in ended] == [0, 0]
    (line,) = [line for each in ended for line in each.err.splitlines() if "not divided evenly" in line]
    assert "Adafactor updates whole parameters only" in line
    assert "of 109.5 KiB of parameters, rank 0 99.27 KiB, rank 1 10.22 KiB; even would be 54.75 KiB each" in line


def test_gradients_are_reduced_while_backward_runs() -> None:
    run(2, case("sent_early", model="odd"), case("sent_early", model="large"))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_weights_have_the_bits_of_training_without_sharding(dtype: str, tmp_path: Path) -> None:
    optimizers = ("sgd", "adamw", "adafactor", "rmsprop", "adamw-fused")
    cases = []
    for each in optimizers:
        about = {"model": "large", "optimizer": each, "folder": str(tmp_path)}
        cases.append(case("write_weights", {"shard_optimizer_state": False}, dtype, file=f"{each}_all.pt", **about))
        cases.append(case("write_weights", None, dtype, file=f"{each}_shared.pt", **about))
    run(2, *cases)
    for each in optimizers:
        one, other = (torch.load(tmp_path / f"{each}_{which}.pt") for which in ("all", "shared"))
        for name, value in one.items():
            assert torch.equal(value, other[name]), (each, name)


def test_a_language_model_over_a_pipeline_with_replicas() -> None:
    run(4, case("language_model", PIPELINE))


def test_a_stage_without_parameters() -> None:
    run(4, case("stage_without_parameters", {**PIPELINE, "auto_partition": False, "default_partition": 0}))
