"""What scripts do with sharded optimizer state works exactly, or is refused by name."""

from __future__ import annotations

import pytest
import torch

from tests.optimizer_sharding.running import PIPELINE, case, run


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


def test_failed_steps_and_updates_leave_what_training_goes_on_from() -> None:
    run(2, case("unequal_steps"), *(case("interrupted_gather", rank=rank) for rank in (0, 1)))
    run(3, case("unequal_steps"), case("interrupted_gather", rank=1), case("undone_reduction"))
    run(2, case("undone_reduction"))
    run(4, case("undone_reduction", PIPELINE))


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_step_that_fails_at_once_leaves_updates_of_others_alone(ranks: int) -> None:
    run(ranks, case("failure_after_others_gathered"))


def test_misuse_is_refused_by_name() -> None:
    run(2, case("misuse"), case("different_optimizers"))


def test_sparse_gradients_stay_with_their_owners() -> None:
    run(2, *(case("sparse", optimizer=each) for each in ("sparse-adam", "adagrad", "sgd")))


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
