"""Master weights that are sharded over replicas, each with its state at one owner."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.half_precision.running import run

#: Every kind and every layout in each test here; all pairs of them in `make test-all`.
pytestmark = pytest.mark.covering(1)

KINDS = ("fp16", "bf16")
SHARDED = {"shard_optimizer_state": True}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["dp 2", "pp 2, dp 2"])
def test_training_is_bit_for_bit_the_recipe(kind: str, layout: str) -> None:
    seen = run("is_the_recipe", layout, kind, SHARDED)
    assert all(one["owned"] for one in seen)
    assert all(0 < one["overflows"] < 10 for one in seen) == (kind == "fp16")


@pytest.mark.parametrize("kind", KINDS)
def test_masters_are_clipped_by_the_norm_over_all_shards(kind: str) -> None:
    run("is_the_recipe", "pp 2, dp 2", kind, SHARDED, optimizer="sgd", max_norm=0.5, bound=1e-3)
    run("clipping_gives_the_norm_of_the_whole_model", "pp 2, dp 2", kind, SHARDED)


@pytest.mark.parametrize("kind", KINDS)
def test_norms_of_divided_modules_count_each_element_once(kind: str) -> None:
    run("clipping_gives_the_norm_of_the_whole_model", "pp 2, tp 2", kind, SHARDED, marked=True)


@pytest.mark.parametrize("clips", [False, True])
def test_an_overflow_in_one_share_skips_the_step_on_all(clips: bool) -> None:
    run("an_overflow_on_one_rank_skips_on_all", "pp 2, dp 2", "fp16", SHARDED, bad=1, clips=clips)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_keeps_masters_and_state_of_its_share_only(kind: str) -> None:
    run("masters_are_of_the_share", "dp 2", kind, SHARDED)
    run("masters_are_of_the_share", "dp 2", kind)


@pytest.mark.parametrize("kind", KINDS)
def test_odd_parameters_and_steps_that_fail(kind: str) -> None:
    run("odd_parameters", "dp 2", kind, SHARDED, zeros=True)
    run("a_step_that_fails_leaves_everything", "dp 2", kind, SHARDED)


@pytest.mark.parametrize(
    ("kind", "saving", "loading", "shards"),
    [
        ("fp16", "dp 2", "dp 2", (True, False)),
        ("bf16", "dp 2", "pp 2, dp 2", (True, True)),
        ("fp16", "pp 2, dp 2", "dp 2", (False, True)),
        ("bf16", "dp 2", "dp 2", (True, True)),
    ],
)
def test_training_goes_on_exactly_in_other_layouts(
    tmp_path: Path, kind: str, saving: str, loading: str, shards: tuple[bool, bool]
) -> None:
    path = str(tmp_path / "whole.pt")
    before, after = ({"shard_optimizer_state": each} for each in shards)
    went_on = run("saves_or_goes_on", saving, kind, before, path=path, saves=True)[0]
    assert run("saves_or_goes_on", loading, kind, after, path=path, saves=False)[0] == went_on
