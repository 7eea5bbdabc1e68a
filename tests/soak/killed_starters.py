"""Notebooks and launchers that are killed while their ranks train, again and again: whether any process is left."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

from tests.notebook.killed import Starter

NAMES = ("kernel", "launcher")


def left_of(rounds: int) -> dict[str, int]:
    """Kill so many of each, two at a time; how many processes outlived them, by what was killed."""
    left = dict.fromkeys(NAMES, 0)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            starters = [Starter(name, Path(folder) / f"{name}-{number}") for name in NAMES]
            try:
                for starter in starters:
                    outlived = starter.kill()
                    left[starter.name] += len(outlived)
                    for pid in outlived:
                        os.kill(pid, signal.SIGKILL)
            finally:
                for starter in starters:
                    starter.process.kill()
    return left
