"""Processes that start ranks and are killed: a notebook's kernel, and a launcher; whether anything outlives them.

usage: python -m tests.notebook.killed FOLDER, which is the kernel, and a script for ``shardwright run``
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.jobs.patience import HANG_SECONDS, slowdown

#: Far above what the end of a process takes.
END_SECONDS = 10.0
RANKS = 2


def train(folder: str, *, waits: bool = False) -> None:
    """Be a rank that starts a process of its own, tells who they are, and computes for ever, in one thread."""
    import shardwright as smp
    import torch

    smp.init({"pipeline_parallel_degree": RANKS, "ddp": False})
    child = subprocess.Popen(["sleep", "1000"])
    told = Path(folder) / f"rank-{smp.rank()}"
    told.with_suffix(".new").write_text(f"{os.getpid()} {child.pid}")
    told.with_suffix(".new").rename(told)
    while True:
        torch.ones(100, 100) @ torch.ones(100, 100)
        if waits:
            time.sleep(0.05)


class Starter:
    """A process that starts ranks, until it is killed.

    Attributes:
        name: What it is.
        process: The process.
    """

    def __init__(self, name: str, folder: Path) -> None:
        """Start it; its ranks write into the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        self.name, self._folder = name, folder
        module = ["-m", "tests.notebook.killed", str(folder)]
        command = [sys.executable, *module]
        if name == "launcher":
            command = [sys.executable, "-m", "shardwright", "run", "--ranks", str(RANKS), *module]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        self._log = (folder / "log").open("wb")
        self.process = subprocess.Popen(command, env=environment, stdout=self._log, stderr=self._log)

    def processes(self) -> list[int]:
        """Wait until all ranks train, and return them and what they have started."""
        deadline = time.monotonic() + HANG_SECONDS
        told = [self._folder / f"rank-{rank}" for rank in range(RANKS)]
        while not all(one.exists() for one in told):
            assert self.process.poll() is None, (self._folder / "log").read_text()
            assert time.monotonic() < deadline, (self._folder / "log").read_text()
            time.sleep(0.02)
        return [int(pid) for one in told for pid in one.read_text().split()]

    def kill(self) -> list[int]:
        """Kill it as nobody can prevent; return the processes that outlive it by :data:`END_SECONDS`."""
        processes = self.processes()
        self.process.kill()
        self.process.wait()
        self._log.close()
        deadline = time.monotonic() + END_SECONDS * slowdown()
        while (left := [pid for pid in processes if runs(pid)]) and time.monotonic() < deadline:
            time.sleep(0.02)
        return left


def runs(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def main() -> None:
    """Be the kernel, or a rank of the launcher."""
    (folder,) = sys.argv[1:]
    if "RANK" in os.environ:
        train(folder, waits=True)
    else:
        from shardwright.notebook import launch

        launch(train, folder, ranks=RANKS)


if __name__ == "__main__":
    main()
