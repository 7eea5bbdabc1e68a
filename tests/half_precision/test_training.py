"""Training in half precision is the recipe of half weights, float32 masters and scaled losses."""

from __future__ import annotations

import pytest
import torch

from tests.half_precision.running import run

#: Every kind and every layout in each test here; all pairs of them in `make test-all`.
pytestmark = pytest.mark.covering(1)

KINDS = ("fp16", "bf16")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["one rank", "pp 2", "dp 2", "pp 2, dp 2"])
def test_weights_masters_losses_and_scales_are_bit_for_bit_those_of_the_recipe(kind: str, layout: str) -> None:
    seen = run("is_the_recipe", layout, kind)
    assert all(0 < one["overflows"] < 10 for one in seen) == (kind == "fp16")


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_in_float32_are_those_of_the_recipe_where_torch_has_them(kind: str) -> None:
    config = {"_fp32_grad_accumulation": True, "microbatches": 4}
    if hasattr(torch.Tensor, "grad_dtype"):
        run("is_the_recipe", "pp 2, dp 2", kind, config)
    else:
        with pytest.raises(AssertionError, match=r"which needs a PyTorch whose tensors have grad_dtype"):
            run("is_the_recipe", "pp 2, dp 2", kind, config)


@pytest.mark.parametrize(("optimizer", "bound"), [("sgd", 0.0), ("fused adam", 0.0), ("novograd", 0.0), ("lamb", 1e-4)])
def test_any_optimizer_updates_the_masters(optimizer: str, bound: float) -> None:
    run("is_the_recipe", "pp 2", "fp16", optimizer=optimizer, bound=bound)


@pytest.mark.parametrize("kind", KINDS)
def test_masters_are_clipped_by_the_norm_over_the_whole_model(kind: str) -> None:
    run("is_the_recipe", "pp 2, dp 2", kind, optimizer="sgd", max_norm=0.5, bound=1e-3)


# The law of every single step is above; the curves are long, and `make parity-memory` has more of them.
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["pp 2", "dp 2"])
def test_the_loss_curve_is_near_that_of_float32(kind: str, layout: str) -> None:
    run("learns_as_in_float32", layout, kind)


@pytest.mark.parametrize("kind", ["fp16", pytest.param("bf16", marks=pytest.mark.slow)])
def test_the_loss_curve_is_near_that_of_float32_where_reductions_overlap(kind: str) -> None:
    config = {"overlapping_allreduce": None, "deterministic_server": False}
    run("learns_as_in_float32", "pp 2, dp 2", kind, config, steps=120)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["tp 2", "pp 2, tp 2"])
def test_the_loss_curve_of_a_divided_model_is_near_that_of_float32(kind: str, layout: str) -> None:
    run("learns_as_in_float32", layout, kind, marked=True)


@pytest.mark.parametrize("layout", ["pp 2", "dp 2", "pp 2, dp 2"])
@pytest.mark.parametrize("clips", [False, True])
def test_an_overflow_on_one_rank_skips_the_step_on_all(layout: str, clips: bool) -> None:
    run("an_overflow_on_one_rank_skips_on_all", layout, "fp16", bad=1, clips=clips)


@pytest.mark.parametrize("layout", ["tp 2", "pp 2, tp 2"])
def test_an_overflow_in_a_part_of_a_weight_skips_the_step_on_all(layout: str) -> None:
    run("an_overflow_on_one_rank_skips_on_all", layout, "fp16", bad=1, in_a_row=3, marked=True)
