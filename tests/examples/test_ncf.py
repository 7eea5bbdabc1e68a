"""Neural collaborative filtering, tiny, learns what its users like."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.running import EXAMPLES, run_script

NCF = EXAMPLES / "ncf.py"
SMALL = [
    "--users",
    "200",
    "--items",
    "64",
    "--gmf-width",
    "8",
    "--mlp-width",
    "16",
    "--steps",
    "60",
    "--batch-size",
    "64",
    "--learning-rate",
    "0.01",
]


@pytest.mark.parametrize(("ranks", "degree"), [(1, 1), (2, 2), (2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_it_learns(ranks: int, degree: int, tmp_path: Path) -> None:
    report = run_script(NCF, *SMALL, "--tensor-parallel-degree", str(degree), ranks=ranks, folder=tmp_path)
    assert report["loss_last"] < report["loss_first"] - 0.04
    assert report["table_bytes"] == 2 * (200 + 64) * (8 + 16) * 4 // degree // 2
