"""Runs steps one after another, each in a process group of its own with a deadline; none can hold up the next."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.gpu_day import processes, stacks, step
from tools.gpu_day.options import Options
from tools.gpu_day.output import Output
from tools.gpu_day.plan import Step

#: What a whole run may take.
RUN_SECONDS = 480.0
#: Of that, what remains for stacks, for ending the last step, and for the runner's own end.
RESERVE_SECONDS = 20.0
#: A step is not begun with less.
LEAST_SECONDS = 10.0
_DUMP_SECONDS = 5.0
_END_SECONDS = 5.0
#: How long what a step has started may outlive it.
_LEFT_SECONDS = 2.0
_POLL_SECONDS = 0.02
#: A step that writes more is ended.
_MAX_WRITTEN_BYTES = 256 << 20
_RESULT_BYTES = 1 << 20


class Runner:
    """Runs a plan.

    Attributes:
        output: Where results go.
    """

    def __init__(self, options: Options, output: Output, began: float, seconds: float = RUN_SECONDS) -> None:
        """Prepare a run.

        Args:
            options: What steps are told; the folder is where each gets one of its own.
            output: Where results go.
            began: When the run began, by :func:`time.monotonic`.
            seconds: The most that it may take from there.
        """
        self.output = output
        self._options = options
        self._until = began + seconds - min(RESERVE_SECONDS, seconds / 10)
        self._least = min(LEAST_SECONDS, seconds / 10)

    def run(self, plan: Sequence[Step]) -> None:
        """Run the steps that apply to the device."""
        for each in plan:
            if self._options.device not in each.devices:
                continue
            left = self._until - time.monotonic()
            if left < self._least:
                row = {"step": each.name, "state": "not run", "seconds": 0.0, "error": "no time was left for it"}
                self.output.add(row, [])
                continue
            self._step(each, min(each.seconds * self._options.patience, left))

    def _step(self, each: Step, seconds: float) -> None:
        folder = self._options.folder / each.name
        folder.mkdir(parents=True)
        options = replace(self._options, folder=folder)
        out, err, dumped = (folder / name for name in ("out", "err", "stacks"))
        dumped.touch()
        module = ["tools.gpu_day.step", each.module_name, *options.arguments()]
        began = time.monotonic()
        pid = processes.start(
            lambda: step.run(each.module_name, options), module, stacks.environment(dumped), out, err, session=True
        )
        code, ended = self._wait(pid, began + seconds, out, err)
        row: dict[str, Any] = {"step": each.name, "state": ended, "seconds": 0.0}
        if code is None:
            stacks.dump(processes.descendants(), dumped, _DUMP_SECONDS)
            row["error"] = f"ended after {time.monotonic() - began:.1f} s: stacks are in the log"
        left = self._end(_LEFT_SECONDS if code is not None else 0.0)
        found = _result(out)
        if code is not None:
            if found is None:
                row |= {"state": "failed", "error": f"it left no result, and ended with {code}"}
            else:
                row["state"] = "passed" if found["passed"] and code == 0 else "failed"
        row |= found or {}
        row["seconds"] = round(time.monotonic() - began, 1)
        if left:
            row["processes_left"] = left
        self.output.add(row, [out, err, *sorted(folder.rglob("*.log")), dumped])

    @staticmethod
    def _wait(pid: int, deadline: float, out: Path, err: Path) -> tuple[int | None, str]:
        """The exit code of a step; None if it had to be ended, and why."""
        while (code := processes.poll(pid)) is None:
            if time.monotonic() > deadline:
                return None, "deadline"
            if any(path.exists() and path.stat().st_size > _MAX_WRITTEN_BYTES for path in (out, err)):
                return None, "wrote too much"
            time.sleep(_POLL_SECONDS)
        return code, ""

    @staticmethod
    def _end(seconds: float) -> int:
        """End all that a step left behind; how many processes there were once they had had time to end."""
        until = time.monotonic() + seconds
        while processes.descendants() and time.monotonic() < until:
            processes.reap()
            time.sleep(_POLL_SECONDS)
        return processes.end_descendants(_END_SECONDS)


def _result(out: Path) -> dict[str, Any] | None:
    """What a step returned: the last line of its output."""
    with suppress(OSError, ValueError, IndexError):
        with out.open("rb") as file:
            file.seek(max(out.stat().st_size - _RESULT_BYTES, 0))
            found = json.loads(file.read().splitlines()[-1])
        if isinstance(found, dict) and isinstance(found.get("passed"), bool):
            return found
    return None
