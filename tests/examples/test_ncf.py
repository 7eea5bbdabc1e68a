"""Neural collaborative filtering, tiny, learns what its users like."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NCF = Path(__file__).parents[2] / "examples" / "ncf.py"
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


@pytest.mark.parametrize(("ranks", "degree"), [(1, 1), (2, 2), (2, 1), (4, 2)])
def test_it_learns(ranks: int, degree: int, tmp_path: Path) -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    result = subprocess.run(
        [sys.executable, *launch, NCF, *SMALL, "--tensor-parallel-degree", str(degree)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["loss_last"] < report["loss_first"] - 0.04
    assert report["table_bytes"] == 2 * (200 + 64) * (8 + 16) * 4 // degree // 2
