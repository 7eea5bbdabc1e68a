"""Processes that are forked from one that has torch loaded, with the face of ``subprocess.Popen``."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from .fork_server import REQUEST_BYTES
from .patience import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[2]
#: Where the fork server of this run of tests listens; whoever starts it tells those that it starts.
ADDRESS = "SHARDWRIGHT_FORK_SERVER"

_LOCK = threading.Lock()


class Forked:
    """A forked process; methods and attributes are those of ``subprocess.Popen``.

    Attributes:
        pid: The process id.
        returncode: The exit code, negative for a signal; None while it runs or nobody has asked.
        stdin: Where to write to its standard input, if it was to be a pipe.
        stdout: Where to read its standard output, if it was to be a pipe.
        stderr: Where to read its standard error, if it was to be a pipe.
    """

    def __init__(
        self,
        command: Iterable[str | Path],
        environment: Mapping[str, str],
        *,
        folder: Path | None = None,
        stdin: int | IO[Any] = subprocess.DEVNULL,
        stdout: int | IO[Any] = subprocess.PIPE,
        stderr: int | IO[Any] = subprocess.PIPE,
        session: bool = False,
    ) -> None:
        """Fork a process.

        Args:
            command: A script, ``-m`` and a module, or ``-c`` and its text; then its arguments.
            environment: Its environment; ``OMP_NUM_THREADS`` is 1, since torch is loaded already.
            folder: Where it runs.
            stdin: As for ``Popen``; text.
            stdout: As for ``Popen``; text.
            stderr: As for ``Popen``; text.
            session: Whether it leads a session of its own.
        """
        self._lock = threading.Lock()
        self.returncode: int | None = None
        with contextlib.ExitStack() as given:
            child_in, self.stdin = _stream(stdin, "w", given)
            child_out, self.stdout = _stream(stdout, "r", given)
            child_err, self.stderr = (child_out, None) if stderr == subprocess.STDOUT else _stream(stderr, "r", given)
            request = {
                "command": [*map(str, command)],
                "environment": {**environment, "OMP_NUM_THREADS": "1"},
                "folder": str(folder or Path.cwd()),
                "session": session,
            }
            text = json.dumps(request).encode()
            assert len(text) < REQUEST_BYTES, f"a request of {len(text)} bytes"
            self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._server.connect(fork_server())
            socket.send_fds(self._server, [text], [child_in, child_out, child_err])
        self.pid: int = self._news(time.monotonic() + HANG_SECONDS)["pid"]

    def _news(self, deadline: float) -> dict[str, int]:
        if not select.select([self._server], [], [], max(deadline - time.monotonic(), 0.0))[0]:
            raise TimeoutError("the fork server does not answer")
        text = self._server.recv(1 << 12)
        if not text:
            raise RuntimeError("the fork server has ended")
        return dict(json.loads(text))

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: It still runs.
        """
        deadline = time.monotonic() + (1e6 if timeout is None else timeout)
        while self.returncode is None:
            left = max(deadline - time.monotonic(), 0.0)
            ready = select.select([self._server], [], [], left)[0]
            with self._lock:
                if self.returncode is None:
                    if not ready:
                        raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
                    self.returncode = self._news(deadline + HANG_SECONDS)["code"]
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read both streams to their end and wait for the process.

        Raises:
            subprocess.TimeoutExpired: It still runs.
        """
        deadline = time.monotonic() + (1e6 if timeout is None else timeout)
        found: dict[str, str] = {}

        def read(name: str, stream: IO[str]) -> None:
            found[name] = stream.read()

        made = {name: getattr(self, name) for name in ("stdout", "stderr")}
        streams = {name: stream for name, stream in made.items() if stream is not None and not stream.closed}
        readers = [threading.Thread(target=read, args=each, daemon=True) for each in streams.items()]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(max(deadline - time.monotonic(), 0.0))
            if reader.is_alive():
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        for stream in streams.values():
            stream.close()
        return found.get("stdout", ""), found.get("stderr", "")

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _stream(wanted: int | IO[Any], mode: str, given: contextlib.ExitStack) -> tuple[int, IO[str] | None]:
    """The child's descriptor of a stream, closed here with ``given``, and our end of it if it is a pipe."""
    if wanted == subprocess.PIPE:
        reading, writing = os.pipe()
        own, childs = (writing, reading) if mode == "w" else (reading, writing)
        given.callback(os.close, childs)
        return childs, open(own, mode, buffering=1)
    if wanted == subprocess.DEVNULL:
        descriptor = os.open(os.devnull, os.O_RDWR)
        given.callback(os.close, descriptor)
        return descriptor, None
    return wanted if isinstance(wanted, int) else wanted.fileno(), None


def fork_server() -> str:
    """Where the fork server listens: one for a run of tests, whatever it starts; it ends with whoever started it."""
    with _LOCK:
        if ADDRESS not in os.environ:
            os.environ[ADDRESS] = _start()
    return os.environ[ADDRESS]


def _start() -> str:
    folder = tempfile.mkdtemp(prefix="shardwright-fork-")  # nobody else may enter it
    address = f"{folder}/server"
    path = os.pathsep.join(
        [str(ROOT / "python"), str(ROOT / "compat"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    settings = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.jobs.fork_server", address],
        env={**os.environ, **settings, "PYTHONPATH": path},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        start_new_session=True,  # a signal to the terminal's group is the tests' to pass on
    )
    atexit.register(_end, server, folder)
    deadline = time.monotonic() + HANG_SECONDS
    while not Path(address).exists():
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the fork server does not start (exit code {server.poll()})")
        time.sleep(0.01)
    return address


def _end(server: subprocess.Popen[bytes], folder: str) -> None:
    assert server.stdin is not None
    server.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(1.0)
    shutil.rmtree(folder, ignore_errors=True)
