"""Saved state of sharded optimizers goes on elsewhere as one process does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.optimizer_sharding.running import PIPELINE, case, run


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", pytest.param("sgd", marks=pytest.mark.slow)])
def test_saved_state_is_loaded_in_other_layouts(optimizer: str, tmp_path: Path) -> None:
    about = {"model": "odd", "optimizer": optimizer, "folder": str(tmp_path)}
    run(3, case("save", replicas=3, **about))
    run(3, case("resume", form="same", **about))
    forms = ("whole", "plain", "half", "gathered", "shares")
    run(2, *(case("resume", form=form, late=late, **about) for form in forms for late in (False, True)))
    run(2, *(case("resume", {"shard_optimizer_state": False}, form=form, **about) for form in forms))
    run(1, *(case("resume", form=form, **about) for form in forms))
    run(2, *(case("resume", PIPELINE, form=form, late=late, **about) for form in forms for late in (False, True)))
    run(4, *(case("resume", PIPELINE, form=form, late=late, **about) for form in forms for late in (False, True)))


def test_what_a_pipeline_saves_is_loaded_elsewhere(tmp_path: Path) -> None:
    about = {"model": "odd", "optimizer": "adamw", "folder": str(tmp_path)}
    run(4, case("save", PIPELINE, replicas=2, **about), case("resume", PIPELINE, form="same", **about))
    run(3, *(case("resume", form=form, **about) for form in ("whole", "gathered", "shares")))


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_shares_are_loaded_with_master_weights(kind: str, tmp_path: Path) -> None:
    about = {"model": "odd", "optimizer": "adamw", "folder": str(tmp_path)}
    run(3, case("save", replicas=3, **about))
    keys = {"shard_optimizer_state": False, kind: True}
    run(2, *(case("load_with_masters", keys, form=form, **about) for form in ("whole", "gathered", "shares")))
