"""Two ranks that save, in processes that are forked, so that one can be ended at any moment without costing a start."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from shardwright._core import CheckpointMemory, CheckpointWriter
from shardwright.errors import ShardwrightError

from tests.jobs.patience import HANG_SECONDS
from tests.torn.states import RANKS, commit, write

#: A forked rank ends with it after an error that it was to meet.
REFUSED = 7
#: How long anything here may take.
LIMIT_SECONDS = HANG_SECONDS


class Told(NamedTuple):
    """What rank 0 has told.

    Attributes:
        begun: The last step whose saving began.
        written: The last step whose parts were all there.
        complete: The last step whose saving ended.
    """

    begun: int
    written: int
    complete: int


class Ranks:
    """Both ranks of a job that saves at every step, until they are ended.

    Args:
        folder: The directory of checkpoints.
        first: The first step.
        steps: How many, or None for no end.
        tag: The checkpoint's tag for a step.
        background: Whether threads write.
        before: Called by each rank in its process with its number, before it begins.
    """

    def __init__(
        self,
        folder: Path,
        first: int,
        *,
        steps: int | None = None,
        tag: Callable[[int], str],
        background: bool = False,
        before: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Fork them."""
        self._mine, theirs = socket.socketpair()
        peers = socket.socketpair()
        #: What has been heard so far; all there is once they have ended.
        self.told = Told(first - 1, first - 1, first - 1)
        self._rest = b""
        self.pids: list[int] = []
        numbers = itertools.count(first) if steps is None else iter(range(first, first + steps))
        for rank in range(RANKS):
            pid = os.fork()
            if pid:
                self.pids.append(pid)
                continue
            status = 1
            try:
                self._mine.close()
                peers[1 - rank].close()
                if rank == 1:
                    theirs.close()
                before(rank)
                status = _save(folder, rank, numbers, tag, background, peers[rank], theirs)
            finally:
                os._exit(status)
        for one in (theirs, *peers):
            one.close()

    def wait_until(self, what: str, step: int) -> None:
        """Wait until the saving of a step is "begun", "written" or "complete"."""
        end = time.monotonic() + LIMIT_SECONDS
        while getattr(self.told, what) < step:
            if not select.select([self._mine], [], [], max(end - time.monotonic(), 0.0))[0] or not self._hear():
                self.kill(list(range(RANKS)))  # they hold the output of this process, which would not end
                raise TimeoutError(f"step {step} was not {what}")

    def _hear(self) -> bool:
        """Take what is there to be heard; whether there was anything before the end."""
        received = self._mine.recv(1 << 16)
        self._rest += received
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            what, step = line.split()
            self.told = self.told._replace(**{what.decode(): int(step)})
        return bool(received)

    def kill(self, ranks: list[int]) -> None:
        """End some, as the kernel does it."""
        for rank in ranks:
            os.kill(self.pids[rank], signal.SIGKILL)

    def ended(self) -> list[int]:
        """Wait until both have ended, by themselves or not: their exit codes, negative for a signal."""
        codes = []
        for pid in self.pids:
            end = time.monotonic() + LIMIT_SECONDS
            while True:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes.append(os.waitstatus_to_exitcode(status))
                    break
                if time.monotonic() > end:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    raise TimeoutError(f"process {pid} did not end")
                time.sleep(0.001)
        while self._hear():
            pass
        self._mine.close()
        return codes


def _save(
    folder: Path,
    rank: int,
    steps: Iterator[int],
    tag: Callable[[int], str],
    background: bool,
    peer: socket.socket,
    told: socket.socket,
) -> int:
    """What a rank does; its exit code. It ends when the other one has."""
    memory = CheckpointMemory() if background else None
    for step in steps:
        if rank == 0:
            told.sendall(b"begun %d\n" % step)
        try:
            report = write(folder, tag(step), rank, step, memory)
            if rank == 1:
                peer.sendall(report.encode() + b"\n")
                answer = _line(peer)
            else:
                answer = _line(peer)
                if answer:
                    told.sendall(b"written %d\n" % step)
                    commit(folder, tag(step), step, [report, answer.decode()])
                    told.sendall(b"complete %d\n" % step)
                    peer.sendall(b"complete\n")
        except ShardwrightError:
            if step % 2:  # some jobs do not come to it
                with contextlib.suppress(ShardwrightError):
                    CheckpointWriter(folder, tag(step)).abandon()
            return REFUSED
        except OSError:
            return 0  # the other one has ended
        if not answer:
            return 0
    return 0


def _line(peer: socket.socket) -> bytes:
    """What the other rank sends; nothing when it has ended."""
    received = b""
    while not received.endswith(b"\n"):
        more = peer.recv(1 << 16)
        if not more:
            return b""
        received += more
    return received
