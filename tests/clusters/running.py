"""Runs the recipes of `examples/clusters` with stand-ins for the programs of a cluster."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.jobs.patience import HANG_SECONDS

RECIPES = Path(__file__).parents[2] / "examples" / "clusters"
SCRIPT = RECIPES.parent / "elastic.py"
LIMIT_SECONDS = HANG_SECONDS


def run_recipe(
    recipe: str,
    *arguments: str | Path,
    folder: Path,
    tasks: Sequence[int] = (2,),
    hosts: Sequence[str] = ("127.0.0.1",),
    prefixes: Sequence[Sequence[str]] = ((),),
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run a recipe to its end.

    Args:
        recipe: The name of its file.
        arguments: What it is given.
        folder: Where the stand-ins are put.
        tasks: How many ranks each host runs.
        hosts: The hosts' addresses.
        prefixes: What runs a command on each host.
        environment: Further variables.
    """
    programs = folder / "programs"
    programs.mkdir()
    for name in ("srun", "scontrol", "mpirun"):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("stand_in.py")} "$0" "$@"\n')
        program.chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if name != "SHARDWRIGHT_SECRET"}
    pretended = {"hosts": list(hosts), "tasks": list(tasks), "prefixes": [list(prefix) for prefix in prefixes]}
    variables = {
        **inherited,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "STAND_IN": json.dumps(pretended),
        **environment,
    }
    command = [str(RECIPES / recipe), *map(str, arguments)]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=LIMIT_SECONDS)


def trained_by(folder: Path) -> tuple[dict[str, int], int]:
    """What the example says of its last start, and how many steps it has done."""
    lines = [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]
    starts = [line for line in lines if "from_step" in line]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert all(map(math.isfinite, losses))
    return starts[-1], len(losses)
