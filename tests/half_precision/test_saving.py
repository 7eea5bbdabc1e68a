"""State dicts hold master weights and the scaler's state, for the same and other degrees."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.half_precision.running import run

#: Every kind and every layout in each test here; all pairs of them in `make test-all`.
pytestmark = pytest.mark.covering(1)


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
@pytest.mark.parametrize(("saving", "loading"), [("pp 2", "one rank"), ("one rank", "pp 2"), ("pp 2, dp 2", "dp 2")])
def test_training_goes_on_exactly_under_other_degrees(tmp_path: Path, kind: str, saving: str, loading: str) -> None:
    path = str(tmp_path / "whole.pt")
    went_on = run("saves_or_goes_on", saving, kind, path=path, saves=True)[0]
    assert run("saves_or_goes_on", loading, kind, path=path, saves=False)[0] == went_on


def test_training_goes_on_exactly_from_parts(tmp_path: Path) -> None:
    path = str(tmp_path / "part_{}.pt")
    went_on = run("saves_or_goes_on", "pp 2", "fp16", path=path, saves=True, partial=True)[0]
    assert run("saves_or_goes_on", "pp 2", "fp16", path=path, saves=False, partial=True)[0] == went_on


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
@pytest.mark.parametrize("layout", ["one rank", "pp 2"])
def test_state_dicts_of_other_kinds(kind: str, layout: str) -> None:
    run("state_dicts_of_other_kinds", layout, kind)
