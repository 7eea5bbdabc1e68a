"""What the library does in Python for a device, on one that every machine has: an index, and a thread of autograd."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import shardwright

from tests.device.python_device import NAME
from tests.jobs.patience import HANG_SECONDS

TASKS = [f"[0, {microbatch}]" for microbatch in range(4)]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What all scenarios found, each by its name."""
    scenarios = ("placeholders", "gradients")
    root = Path(__file__).parents[2]
    # Not forked from a process that has torch: the engine asks for the devices once.
    ended = subprocess.run(
        [sys.executable, "-m", "tests.device.on_python_device", *scenarios],
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root / 'python'}:{root}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(scenarios), f"it ended with {ended.returncode} after {lines}:\n{ended.stderr[-4000:]}"
    return {line["scenario"]: line["found"] for line in lines}


@pytest.mark.parametrize("mode", ["dynamic", "static", "fast"])
def test_gradients_through_results_that_stayed_on_their_rank_are_those_of_the_cpu(
    found: dict[str, Any], mode: str
) -> None:
    one = found["gradients"][mode]
    assert isinstance(one, dict), one
    assert one["worst"] == 0
    assert one["devices"] == [f"{NAME}:0", f"remote {NAME}:0"], "a result must have been remote, on a device with index"


@pytest.mark.parametrize("mode", ["dynamic", "static", "fast"])
def test_backward_and_second_computation_run_in_the_name_of_their_task_on_its_thread(
    found: dict[str, Any], mode: str
) -> None:
    one = found["gradients"][mode]
    assert one["threads"] == ["shardwright-worker"]
    assert one["tasks"] == TASKS


@pytest.mark.parametrize("kind", ["sentinels", "released", "moved", "delayed", "shapes"])
def test_a_placeholder_has_the_device_of_what_it_stands_for_index_included(found: dict[str, Any], kind: str) -> None:
    devices = found["placeholders"][kind]
    assert len(devices) >= 3
    assert set(devices) == {f"{NAME}:0"}


def test_these_are_all_placeholders_that_there_are() -> None:
    """Only a tensor without memory can be without an index: torch gives one to all others."""
    root = Path(shardwright.__file__).parent
    makers = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("_make_wrapper_subclass", "_make_subclass"):
                makers.add(path.relative_to(root).as_posix())
    assert makers == {"frames/remote.py", "model/sentinel.py", "delayed/tensor.py"}
