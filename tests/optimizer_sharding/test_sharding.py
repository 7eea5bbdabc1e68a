"""Training with sharded optimizer state is that of plain PyTorch in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.jobs.ranks import outputs_of_ranks, run_ranks
from tests.optimizer_sharding.problems import OPTIMIZERS

PIPELINE = {"pipeline_parallel_degree": 2}
TENSOR = {"tensor_parallel_degree": 2}


def case(name: str, config: dict[str, Any] | None = None, dtype: str = "float64", **arguments: Any) -> dict[str, Any]:
    """A case: its name and arguments, and keys of the configuration."""
    return {"name": name, "config": config or {}, "dtype": dtype, "arguments": arguments}


def run(ranks: int, *cases: dict[str, Any]) -> None:
    """Run cases in one job."""
    outputs = outputs_of_ranks("-m", "tests.optimizer_sharding.rank", json.dumps(cases), ranks=ranks)
    assert all("all cases hold" in output for output in outputs)


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


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_scripts_do_between_a_step_and_an_update(ranks: int) -> None:
    optimizers = ("sgd", "adamw", "adafactor")
    run(ranks, *(case("scripts", model="odd", optimizer=each) for each in optimizers))


def test_what_scripts_do_in_pipelines() -> None:
    run(4, case("scripts", PIPELINE, model="large", optimizer="adamw"), case("unequal_steps", PIPELINE))


def test_groups_and_optimizers_that_come_later() -> None:
    optimizers = ("sgd", "adamw", "adafactor")
    names = ("added_groups", "late_optimizer", "wrapped_late")
    run(2, *(case(name, optimizer=each) for name in names for each in optimizers))


def test_accumulation_closures_norms_and_several_optimizers() -> None:
    names = ("accumulation", "closures", "whole_norms")
    run(
        2,
        *(case(name, optimizer=each) for name in names for each in ("adamw", "adafactor")),
        case("several_optimizers"),
    )


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


def test_failed_steps_and_updates_leave_what_training_goes_on_from() -> None:
    run(2, case("unequal_steps"), *(case("interrupted_gather", rank=rank) for rank in (0, 1)))
    run(3, case("unequal_steps"), case("interrupted_gather", rank=1), case("undone_reduction"))
    run(2, case("undone_reduction"))
    run(4, case("undone_reduction", PIPELINE))


def test_misuse_is_refused_by_name() -> None:
    run(2, case("misuse"), case("different_optimizers"))


def test_sparse_gradients_stay_with_their_owners() -> None:
    run(2, *(case("sparse", optimizer=each) for each in ("sparse-adam", "adagrad", "sgd")))


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "sgd"])
def test_saved_state_is_loaded_in_other_layouts(optimizer: str, tmp_path: Path) -> None:
    about = {"model": "odd", "optimizer": optimizer, "folder": str(tmp_path)}
    run(3, case("save", replicas=3, **about))
    run(3, case("resume", form="same", **about))
    forms = ("whole", "plain", "gathered", "shares")
    run(2, *(case("resume", form=form, late=late, **about) for form in forms for late in (False, True)))
    run(2, *(case("resume", {"shard_optimizer_state": False}, form=form, **about) for form in forms))
    run(1, *(case("resume", form=form, **about) for form in forms))
    run(2, *(case("resume", PIPELINE, form=form, late=late, **about) for form in forms for late in (False, True)))
    run(4, *(case("resume", PIPELINE, form=form, late=late, **about) for form in forms for late in (False, True)))


def test_what_a_pipeline_saves_is_loaded_elsewhere(tmp_path: Path) -> None:
    about = {"model": "odd", "optimizer": "adamw", "folder": str(tmp_path)}
    run(4, case("save", PIPELINE, replicas=2, **about), case("resume", PIPELINE, form="same", **about))
    run(3, *(case("resume", form=form, **about) for form in ("whole", "gathered", "shares")))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adafactor", "rmsprop", "adamw-fused"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_weights_have_the_bits_of_training_without_sharding(optimizer: str, dtype: str, tmp_path: Path) -> None:
    about = {"model": "large", "optimizer": optimizer, "folder": str(tmp_path)}
    off = {"shard_optimizer_state": False}
    run(
        2,
        case("write_weights", off, dtype, file="all.pt", **about),
        case("write_weights", None, dtype, file="shared.pt", **about),
    )
    one, other = torch.load(tmp_path / "all.pt"), torch.load(tmp_path / "shared.pt")
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("ranks", [2, 3])
def test_unusual_parameters_and_scripts(ranks: int) -> None:
    names = ("scaler", "alien_parameter", "two_models", "user_hooks", "subclass", "delayed", "stale_graph")
    run(ranks, *(case("layouts", optimizer=each) for each in ("adamw", "sgd")), *map(case, names))


def test_readers_see_whole_weights() -> None:
    run(2, *(case("readers", optimizer=each) for each in ("adamw", "adafactor")))
    run(4, case("readers", PIPELINE, optimizer="adamw"))


def test_models_that_are_verified_first_or_delayed_or_have_wide_gradients() -> None:
    run(4, case("verified_first", PIPELINE), case("delayed", PIPELINE))
    wide = [case("wide_gradients")] if hasattr(torch.Tensor, "grad_dtype") else []  # from torch 2.10 on
    run(2, case("verified_first"), *wide)


def test_a_language_model_over_a_pipeline_with_replicas() -> None:
    run(4, case("language_model", PIPELINE))


def test_a_stage_without_parameters() -> None:
    run(4, case("stage_without_parameters", {**PIPELINE, "auto_partition": False, "default_partition": 0}))
