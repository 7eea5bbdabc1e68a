"""Ranks of a job as forks of one process, which has imported everything: fifty jobs start in fifty seconds."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.jobs.job import torchrun_environment
from tests.jobs.ports import next_port

SHARED_MEMORY = Path("/dev/shm")


def shared_memory_in_use() -> set[str]:
    """The files of shared memory that a living process has open or mapped."""
    used = set()
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            lines = (process / "maps").read_text().splitlines()
            used |= {line.split(None, 5)[5] for line in lines if str(SHARED_MEMORY) in line}
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    used.add(os.readlink(descriptor))
    return {Path(name).name for name in used if name.startswith(f"{SHARED_MEMORY}/")}


def shared_memory() -> set[str]:
    """The names of all files of shared memory."""
    return {path.name for path in SHARED_MEMORY.iterdir()}


class Rank:
    """A forked process that says and is told things, a line of JSON each."""

    def __init__(self, work: Callable[[Rank], None], environment: dict[str, str]) -> None:
        from_child, to_parent = os.pipe()
        from_parent, to_child = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(from_child)
            os.close(to_child)
            self.input, self.output = from_parent, to_parent
            self._be(work, environment)
        os.close(to_parent)
        os.close(from_parent)
        self.input, self.output = from_child, to_child
        self.code: int | None = None
        self._unread = b""

    def _be(self, work: Callable[[Rank], None], environment: dict[str, str]) -> None:
        code = 1
        try:
            os.environ.update(environment)
            work(self)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # what follows belongs to the parent

    def say(self, **fields: Any) -> None:
        """Write a line."""
        line = json.dumps(fields).encode() + b"\n"
        while line:
            line = line[os.write(self.output, line) :]

    def hear(self, deadline: float) -> dict[str, Any] | None:
        """The next line; none when there is none before the deadline, or will never be."""
        self._unread = getattr(self, "_unread", b"")
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.input], [], [], left)[0]:
                return None
            read = os.read(self.input, 1 << 16)
            if not read:
                return None
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        said: dict[str, Any] = json.loads(line)
        return said

    def end(self, deadline: float) -> bool:
        """Wait for its end; false when it had to be killed."""
        while self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                self._close()
                return False
            else:
                time.sleep(0.01)
        self._close()
        return True

    def _close(self) -> None:
        for descriptor in (self.input, self.output):
            with contextlib.suppress(OSError):
                os.close(descriptor)


class Job:
    """The ranks of one job; leaving it ends them all."""

    def __init__(self, ranks: int, work: Callable[[Rank], None]) -> None:
        port = next_port()
        self.ranks: list[Rank] = []
        for rank in range(ranks):
            self.ranks.append(Rank(work, torchrun_environment(rank, ranks, port)))
        #: How many processes did not end by themselves.
        self.left_over = 0

    def __enter__(self) -> Job:
        return self

    def end(self, seconds: float) -> None:
        """Wait for the end of all, and kill those that do not end."""
        deadline = time.monotonic() + seconds
        for rank in self.ranks:
            if rank.code is None and not rank.end(deadline):
                self.left_over += 1

    def __exit__(self, *_: object) -> None:
        self.end(0.0)
