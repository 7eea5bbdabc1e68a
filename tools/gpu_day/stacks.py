"""Stacks of all threads of all processes of a step, before its deadline ends them."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from tools.gpu_day import processes

#: Names the file to which a process writes its stacks when it is asked by :data:`SIGNAL`.
VARIABLE = "SHARDWRIGHT_GPU_DAY_STACKS"
SIGNAL = signal.SIGUSR1
HOOK = Path(__file__).with_name("hook")
_PROCESS_SECONDS = 1.0
_QUIET_SECONDS = 0.1


def environment(path: Path) -> dict[str, str]:
    """The variables with which every Python process that a step starts writes its stacks to a file."""
    paths = [str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {VARIABLE: str(path), "PYTHONPATH": os.pathsep.join(paths)}


def register() -> None:
    """Write this process's stacks, and those of its forks, to the file in the environment at every :data:`SIGNAL`."""
    if path := os.environ.get(VARIABLE):
        to = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        faulthandler.register(SIGNAL, file=to, all_threads=True)


def dump(pids: list[int], path: Path, seconds: float) -> None:
    """Have processes write their stacks to a file, one after another.

    Args:
        pids: The processes. Of those that cannot be asked, the file says what their threads wait for in the kernel.
        path: The file that the environment of the processes names.
        seconds: How long it may take in all.
    """
    deadline = time.monotonic() + seconds
    for pid in pids:
        command = processes.command_of(pid)
        with path.open("a") as file:
            file.write(f"\nprocess {pid}: {command}\n{processes.threads_of(pid)}")
        if not processes.catches(pid, SIGNAL):
            continue
        before = size = path.stat().st_size
        with suppress(ProcessLookupError):
            os.kill(pid, SIGNAL)
        until = min(time.monotonic() + _PROCESS_SECONDS, deadline)
        changed = time.monotonic()
        while (now := time.monotonic()) < until and (size == before or now - changed < _QUIET_SECONDS):
            time.sleep(0.01)
            if (found := path.stat().st_size) != size:
                size, changed = found, now
