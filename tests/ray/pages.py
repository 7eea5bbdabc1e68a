"""Cases that run what users are shown: the guide's page, the example, and our trainer in Ray's loop."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.ray import loops
from tests.ray.driving import cluster, told, trainer

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def guide(folder: Path) -> str:
    """The code of the guide's page runs, as a script whose functions Ray sends by value."""
    page = (ROOT / "docs" / "guide" / "ray.md").read_text()
    parts = CODE.findall(page)
    script = folder / "page.py"
    script.write_text("\n\n".join(parts))
    _run(script, folder)
    return f"{len(parts)} parts of the page"


def example(folder: Path) -> str:
    """The example trains, and goes on when it is run again."""
    script = ROOT / "examples" / "ray_train.py"
    first = _run(script, folder, "--storage", str(folder / "storage"), "--epochs", "1")
    second = _run(script, folder, "--storage", str(folder / "storage"), "--epochs", "2")
    losses = [float(one) for said in (first, second) for one in re.findall(r"^loss ([0-9.]+)$", said, re.MULTILINE)]
    assert len(losses) == 2, (first[-2000:], second[-2000:])
    assert losses[1] < losses[0], losses
    return f"losses {losses}"


def transformers_trainer(folder: Path) -> str:
    """Our trainer in Ray's loop logs the losses that transformers' own logs in one process."""
    alone = loops.trained_by_transformers(folder)
    with cluster(folder):
        trainer(loops.by_our_trainer, folder, 2, {"smp": {"pipeline_parallel_degree": 2, "microbatches": 2}}).fit()
    ours = told(folder)[-1]["losses"]
    assert len(ours) == len(alone) > 1
    away = max(abs(one - other) for one, other in zip(ours, alone, strict=True))
    assert away <= 1e-5, (ours, alone)
    return f"{len(ours)} losses within {away:.1e}"


def _run(script: Path, folder: Path, *arguments: str) -> str:
    """Run a script as a driver with a small cluster of its own, and return what it prints."""
    environment = {**os.environ, "RAY_TMPDIR": str(folder / "ray"), "RAY_OVERRIDE_RESOURCES": '{"CPU": 4}'}
    result = subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-5000:]
    return result.stdout
