"""Runs the steps that only a GPU can show, in order of value and in eight minutes; on a CPU it rehearses them.

Every step runs in a process group of its own with a deadline, and none keeps another from running. Results are printed
as JSON lines, and kept in the output folder (``$OUT`` where it is set) with a table and the logs. The last line is
``{"steps": n, "failed": n, "seconds": s}``; steps for which no time was left count as failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.gpu_day import probe, processes
from tools.gpu_day.options import add_arguments, options_of
from tools.gpu_day.output import Output, table
from tools.gpu_day.plan import Step
from tools.gpu_day.runner import RUN_SECONDS, Runner

ROOT = Path(__file__).resolve().parents[2]
_PROBE_SECONDS = 60.0


def main() -> int:
    """Parse, run, print; the exit code."""
    began = time.monotonic()
    given = _parse()
    if given.device == "cpu" and given.rehearsal is None and given.plan.startswith("tools."):
        from tests.jobs.built import build_rehearsal

        given.rehearsal = build_rehearsal()
    if given.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a rehearsal is one also where there is a device
    processes.adopt_orphans()
    # Asking whether there is a device must not begin to use it, or no fork of this process could.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    module = importlib.import_module(given.plan)
    for name in module.PRELOADED:
        try:
            importlib.import_module(name)
        except Exception:
            traceback.print_exc()
            os.environ[processes.FRESH] = "1"  # each step says by itself what it lacks
    if given.device == "cuda" and (refusal := _device()):
        print(f"gpu_day: {refusal}; `make gpu-rehearse` runs the same steps without one", file=sys.stderr)
        return 2
    folder = given.folder or Path(os.environ.get("OUT") or ROOT / "out" / "gpu_day")
    scratch = Path(tempfile.mkdtemp(prefix="gpu-day-"))
    try:
        output = Output(folder)
        output.note(_machine(given.device, given.tiny))
        options = replace(options_of(given), folder=scratch)
        runner = Runner(options, output, began, given.seconds or RUN_SECONDS * options.patience)
        runner.run(_chosen(module.PLAN, given.only))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    failed = sum(row["state"] != "passed" for row in output.rows)
    print(table(output.rows))
    print(json.dumps({"steps": len(output.rows), "failed": failed, "seconds": round(time.monotonic() - began, 1)}))
    return 1 if failed else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_day", description=__doc__)
    add_arguments(parser)
    parser.set_defaults(tiny=os.environ.get("TINY") == "1")
    parser.add_argument("--only", metavar="STEP,...", help="these steps only")
    parser.add_argument("--seconds", type=float, help="the most that the run may take; 480 on a GPU")
    parser.add_argument("--plan", default="tools.gpu_day.plan", help=argparse.SUPPRESS)
    given = parser.parse_args()
    known = [each.name for each in importlib.import_module(given.plan).PLAN]
    unknown = [name for name in (given.only or "").split(",") if name and name not in known]
    if unknown:
        parser.error(f"there is no step {', '.join(unknown)}; there are {', '.join(known)}")
    return given


def _chosen(plan: Sequence[Step], only: str | None) -> list[Step]:
    return [each for each in plan if only is None or each.name in only.split(",")]


def _device() -> str | None:
    """None if there is a device that forks and fresh processes can use; else why not.

    Where only fresh ones can, all steps are to be fresh processes from then on.
    """
    for fresh in ("", "1") if processes.can_fork() else ("1",):
        os.environ[processes.FRESH] = fresh
        code = _ended(probe.main, [probe.__name__])
        if code == 0:
            return None
        if code == probe.NO_DEVICE:
            return "there is no CUDA device"
    return f"the CUDA device cannot be used (exit code {code}; see above)"


def _ended(run: Any, module: list[str]) -> int | None:
    """The exit code of a process that is forked, or started afresh; None if it does not end."""
    folder = tempfile.mkdtemp(
        prefix="gpu-day-"
    )  # a TemporaryDirectory would be removed by the fork's exit handlers too
    try:
        out = Path(folder) / "out"
        pid = processes.start(run, module, {}, out, out, session=True)
        until = time.monotonic() + _PROBE_SECONDS
        while (code := processes.poll(pid)) is None and time.monotonic() < until:
            time.sleep(0.01)
        processes.end_descendants(5.0)
        sys.stderr.write(out.read_text(errors="replace"))
        return code
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _machine(device: str, tiny: bool) -> dict[str, Any]:
    """The facts of this machine that results depend on."""
    facts: dict[str, Any] = {"device": device, "tiny": tiny, "python": platform.python_version()}
    torch = sys.modules.get("torch")
    facts |= {"torch": str(getattr(torch, "__version__", None)), "cores": os.cpu_count(), "kernel": platform.release()}
    facts["forks"] = processes.can_fork()
    with suppress(OSError, subprocess.SubprocessError):
        packed = ROOT / "COMMIT"  # a pack has it
        facts["commit"] = packed.read_text().strip() if packed.exists() else _said("git", "rev-parse", "HEAD")
    if device == "cuda":
        with suppress(OSError, subprocess.SubprocessError):
            query = "--query-gpu=name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current"
            facts["gpu"] = _said("nvidia-smi", query, "--format=csv,noheader")
    return {"machine": facts}


def _said(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
