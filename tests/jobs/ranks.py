"""Scripts of tests that run as the ranks of a job to their end, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

from .forked import Forked
from .job import torchrun_environment
from .patience import HANG_SECONDS
from .ports import next_port


class Ended(NamedTuple):
    """What a rank came to: its exit code and all that it wrote."""

    code: int | None
    out: str
    err: str


def forked_ranks(
    command: Iterable[str | Path],
    ranks: int,
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    stdout: int | IO[Any] = subprocess.PIPE,
    stderr: int | IO[Any] = subprocess.PIPE,
) -> list[Forked]:
    """Start the ranks of a job, with what torchrun sets; for 0 ranks one process that no launcher started."""
    port, command = next_port(), list(command)
    base = {**os.environ, **(environment or {})}
    launched = [torchrun_environment(rank, ranks, port) for rank in range(ranks)] or [{}]
    return [Forked(command, {**base, **own}, folder=folder, stdout=stdout, stderr=stderr) for own in launched]


def run_ranks(
    *command: str | Path,
    ranks: int = 2,
    seconds: float = HANG_SECONDS,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[Ended]:
    """Run a job to its end.

    Args:
        command: A script, or ``-m`` and a module, and arguments.
        ranks: How many processes run it; 0 for one that no launcher started.
        seconds: How long they may take.
        folder: Where they run.
        environment: What each finds in its environment besides the launcher's variables.
    """
    processes = forked_ranks(command, ranks, folder=folder, environment=environment)
    try:
        with ThreadPoolExecutor(
            len(processes)
        ) as readers:  # all at once: a rank whose pipe is full would stop the others too
            written = list(readers.map(lambda process: process.communicate(timeout=seconds), processes))
    finally:
        for process in processes:
            process.kill()
    return [Ended(process.returncode, *each) for process, each in zip(processes, written, strict=True)]


def outputs_of_ranks(
    *command: str | Path,
    ranks: int = 2,
    seconds: float = HANG_SECONDS,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[str]:
    """What each rank wrote to standard output; a rank that fails fails the test with what it said."""
    ended = run_ranks(*command, ranks=ranks, seconds=seconds, folder=folder, environment=environment)
    assert all(each.code == 0 for each in ended), told(ended)
    return [each.out for each in ended]


def told(ended: Iterable[Ended]) -> str:
    """What ranks that failed came to; first those that did not merely lose another one."""
    failed = [(rank, each) for rank, each in enumerate(ended) if each.code != 0]
    failed.sort(key=lambda one: "PeerLostError" in one[1].err[-4000:])
    return "\n".join(f"rank {rank} ended with {each.code}:\n{each.err[-4000:]}" for rank, each in failed)
