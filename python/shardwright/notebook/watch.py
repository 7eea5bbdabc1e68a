"""The notebook's side of ranks: shows what they write, and collects what comes of them."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import selectors
import signal
import socket
import sys
import time
from typing import Any, TextIO

from shardwright.errors import RemoteError
from shardwright.failure_text import FailureText
from shardwright.notebook.rank import Failure, Pipes

#: How long the other ranks may take to end after one has failed, or after an interrupt.
END_SECONDS = 15.0
_POLL_SECONDS = 0.05
_READ_BYTES = 1 << 16
#: The end of a line, or of a state of a progress bar that the next one is written over.
_END = re.compile(rb"\r*\n|\r+(?![\r\n]|\Z)")


class Watched:
    """A rank, as the notebook's process sees it.

    Attributes:
        rank: Its number.
        pid: Its process.
        status: The process's exit code, negative for a signal; None while it runs.
    """

    def __init__(self, rank: int, pid: int, pipes: Pipes) -> None:
        """Watch a process that was started."""
        self.rank = rank
        self.pid = pid
        self.status: int | None = None
        self._outcome = bytearray()
        self._pipes = dict(zip(pipes, Pipes._fields, strict=True))
        self._lines = {pipes.out: bytearray(), pipes.err: bytearray()}
        for pipe in pipes:
            os.set_blocking(pipe, False)

    @property
    def open_pipes(self) -> list[int]:
        """Those from which something may still come."""
        return list(self._pipes)

    def poll(self) -> bool:
        """Return whether the process has ended."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is not None

    def read(self, pipe: int) -> bool:
        """Take what is in a pipe, show its whole lines, and return whether there may be more now."""
        try:
            got = os.read(pipe, _READ_BYTES)
        except BlockingIOError:
            return False
        if self._pipes[pipe] == "outcome":
            self._outcome += got
        else:
            self._show(pipe, got)
        if not got:
            self._close(pipe)
        return bool(got)

    def _show(self, pipe: int, got: bytes) -> None:
        """Show whole lines and states of progress bars, and at the end of the stream what is left of one."""
        buffer = self._lines[pipe]
        buffer += got
        stream = sys.stdout if self._pipes[pipe] == "out" else sys.stderr
        shown = 0
        for found in _END.finditer(bytes(buffer)):
            line, whole = buffer[shown : found.start()], found[0].endswith(b"\n")
            shown = found.end()
            if line or whole:  # a bar begins by going back to the start of the line
                self._write(stream, line, "\n" if whole else "\r")
        del buffer[:shown]
        if not got and buffer:
            self._write(stream, buffer.rstrip(b"\r"), "\n")
            buffer.clear()
        stream.flush()

    def _write(self, stream: TextIO, line: bytes | bytearray, end: str) -> None:
        stream.write(f"[rank {self.rank}] {line.decode(errors='backslashreplace')}{end}")

    def _close(self, pipe: int) -> None:
        del self._pipes[pipe]
        os.close(pipe)

    def drain(self) -> None:
        """After the end of the process: take what is left, though a child of it may hold the pipes open."""
        for pipe in self.open_pipes:
            while self.read(pipe):
                pass
            if pipe in self._pipes:
                if pipe in self._lines:
                    self._show(pipe, b"")
                self._close(pipe)

    def result(self) -> tuple[Any, Failure | None]:
        """Return what the function returned, or how the rank failed."""
        if self._outcome and self.status == 0:
            try:
                result, failure = pickle.loads(self._outcome)
            except Exception as error:
                message = (
                    f"what the function returned was pickled, but cannot be unpickled ({type(error).__qualname__}: "
                    f"{error}); return numbers, tensors, or a state dict"
                )
                return None, Failure(
                    socket.gethostname(), FailureText("UnsupportedValueError", message, ""), follows=False
                )
            return result, failure
        status = self.status or 0
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        text = FailureText("process", f"it was ended by {how} before its function returned", "")
        return None, Failure(socket.gethostname(), text, follows=False)

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if not self.poll():
            os.kill(self.pid, number)

    def end(self) -> None:
        """End the process with what it has started, and give back what it takes here."""
        if not self.poll():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.signal(signal.SIGKILL)
        while not self.poll():
            time.sleep(_POLL_SECONDS)
        for pipe in self.open_pipes:
            self._close(pipe)


def watch(ranks: list[Watched]) -> list[Any]:
    """Show what the ranks write until all have ended, and return their results.

    Raises:
        RemoteError: A rank failed; the first that did not fail because of another.
    """
    failed: list[tuple[Watched, Failure]] = []
    results: dict[int, Any] = {}
    try:
        _until_ended(ranks, results, failed)
    except KeyboardInterrupt:
        for one in ranks:
            one.signal(signal.SIGINT)
        with contextlib.suppress(KeyboardInterrupt):  # a second one ends them at once
            _until_ended(ranks, results, failed, time.monotonic() + END_SECONDS)
        raise
    if failed:
        rank, failure = next((one for one in failed if not one[1].follows), failed[0])
        raise RemoteError(rank.rank, failure.host, None, None, None, *failure.text)
    return [results[one.rank] for one in ranks]


def _until_ended(
    ranks: list[Watched],
    results: dict[int, Any],
    failed: list[tuple[Watched, Failure]],
    deadline: float | None = None,
) -> None:
    """Read from the ranks until all have ended, or some time after one has failed."""
    while True:
        running = [one for one in ranks if one.rank not in results]
        if not running or (deadline is not None and time.monotonic() > deadline):
            return
        with selectors.DefaultSelector() as selector:
            for one in running:
                for pipe in one.open_pipes:
                    selector.register(pipe, selectors.EVENT_READ, one)
            if not selector.get_map():
                time.sleep(_POLL_SECONDS)
            for key, _ in selector.select(_POLL_SECONDS):
                key.data.read(key.fd)
        for one in running:
            if one.poll():
                one.drain()
                results[one.rank], failure = one.result()
                if failure is not None:
                    failed.append((one, failure))
                    deadline = deadline or time.monotonic() + END_SECONDS
