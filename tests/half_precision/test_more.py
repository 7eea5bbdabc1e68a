"""What surrounds training in half precision: float32 modules, mixed precision, failures, odd parameters."""

from __future__ import annotations

import pytest
import torch

from tests.half_precision.running import run

#: Every kind and every layout in each test here; all pairs of them in `make test-all`.
pytestmark = pytest.mark.covering(1)

KINDS = ("fp16", "bf16")


@pytest.mark.parametrize("kind", ["lamb", "novograd"])
@pytest.mark.parametrize("layout", ["pp 2", "tp 2", pytest.param("pp 2, tp 2", marks=pytest.mark.slow)])
def test_norms_of_layerwise_optimizers_are_of_whole_parameters(kind: str, layout: str) -> None:
    run("layerwise_norms_are_of_whole_parameters", layout, None, kind=kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["one rank", "pp 2"])
def test_modules_are_kept_in_float32(kind: str, layout: str) -> None:
    run("modules_are_kept_in_float32", layout, kind)


@pytest.mark.parametrize("layout", ["pp 2", "tp 2"])
def test_a_grad_scaler_agrees_over_ranks(layout: str) -> None:
    run("a_grad_scaler_agrees_over_ranks", layout, None, bad=1, marked=layout == "tp 2")


@pytest.mark.parametrize("layout", ["one rank", "pp 2", "dp 2"])
def test_a_step_that_fails_leaves_weights_masters_and_scale(layout: str) -> None:
    run("a_step_that_fails_leaves_everything", layout, "fp16")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["one rank", "pp 2", "dp 2"])
def test_odd_parameters(kind: str, layout: str) -> None:
    run("odd_parameters", layout, kind, zeros=layout == "pp 2")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["one rank", "pp 2"])
def test_weights_that_are_written_reach_the_masters(kind: str, layout: str) -> None:
    run("weights_that_are_written_reach_the_masters", layout, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["pp 2, dp 2", "tp 2"])
def test_clipping_gives_the_norm_of_the_whole_model(kind: str, layout: str) -> None:
    run("clipping_gives_the_norm_of_the_whole_model", layout, kind, marked=layout == "tp 2")


@pytest.mark.parametrize("layout", ["tp 2"])
def test_parameters_of_distributed_modules_are_created_in_float16(layout: str) -> None:
    run("parameters_of_distributed_modules_are_float16", layout, "fp16_params")


@pytest.mark.parametrize("layout", ["one rank", "pp 2"])
def test_delayed_parameters_are_cast(layout: str) -> None:
    run("delayed_parameters_are_cast", layout, "bf16")


@pytest.mark.parametrize("schedule", ["simple", "zero_bubble", "looped"])
@pytest.mark.parametrize("wide", [False, True] if hasattr(torch.Tensor, "grad_dtype") else [False])
def test_any_schedule_trains_as_the_recipe(schedule: str, wide: bool) -> None:
    config = {"pipeline": schedule, "_fp32_grad_accumulation": wide, "microbatches": 4}
    run("is_the_recipe", "pp 2", "fp16", config)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["dp 2", pytest.param("pp 2, dp 2", marks=pytest.mark.slow)])
def test_replicas_with_fewer_batches_join(kind: str, layout: str) -> None:
    run("replicas_with_fewer_batches_join", layout, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["pp 2", "dp 2"])
def test_an_update_that_fails_on_one_rank_is_refused_and_can_be_taken_back(kind: str, layout: str) -> None:
    run("an_update_that_fails_on_one_rank", layout, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["one rank", "pp 2, dp 2"])
def test_gradients_are_accumulated_and_weighted(kind: str, layout: str) -> None:
    run("gradients_are_accumulated_and_weighted", layout, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("layout", "optimize"), [("pp 2", "memory"), ("tp 2", "memory"), ("tp 2", "speed")])
def test_a_model_of_transformers(kind: str, layout: str, optimize: str) -> None:
    run("a_model_of_transformers", layout, kind, {"optimize": optimize}, marked=layout == "tp 2")


def test_static_mode_trains_as_the_recipe() -> None:
    run("is_the_recipe", "pp 2", "fp16", {"static_mode": True, "fast_mode": True})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("layout", "optimize"), [("tp 2", "memory"), ("tp 2", "speed"), ("pp 2, tp 2", "memory"), ("pp 2, tp 2", "speed")]
)
def test_gradients_of_divided_modules_are_as_exact_as_in_one_process(kind: str, layout: str, optimize: str) -> None:
    run("gradients_of_divided_modules_are_as_exact", layout, kind, {"optimize": optimize})
