"""Runs example scripts as a user does, and reads what they report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"


def on_ranks(ranks: int) -> tuple[str, ...]:
    """What goes before a script so that it runs as so many processes."""
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))


def run_script(*command: str | Path, folder: Path | None = None, **environment: str) -> dict[str, Any]:
    """Run a script and return the JSON object on the last line of its output."""
    result = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert isinstance(report, dict)
    return report
