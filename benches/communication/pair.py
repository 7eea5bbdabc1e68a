"""Two processes that measure messages between each other, told from here what to do next."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 60.0
_CLEARED = ("OMPI_", "PMIX_", "SLURM_", "TORCHELASTIC_", "SHARDWRIGHT_", "SM_HP_", "UCX_")


class PairError(Exception):
    """A pair did not start, or did not do what it was told."""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Pair:
    """Two ranks of one kind.

    They sleep in the kernel until they are told something, so that pairs that wait take nothing from the one measured.
    """

    def __init__(self, kind: str, python: Path | None = None, launcher: list[str] | None = None) -> None:
        """Start them: two processes, or one launcher that starts both.

        Args:
            kind: What they use; see ``rank.py``.
            python: The interpreter, this one by default.
            launcher: A command that runs the rest of its command line as both ranks.
        """
        self.kind = kind
        self._folder = tempfile.TemporaryDirectory(prefix="bench-communication-")
        folder = Path(self._folder.name)
        self._errors = folder / "errors"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Any] = [None, None]
        self._streams: list[Any] = [None, None]
        address = str(folder / "control")
        command = [str(python or sys.executable), "-m", "benches.communication.rank", kind, address]
        base = {name: value for name, value in os.environ.items() if not name.startswith(_CLEARED)}
        paths = f"{ROOT}:{ROOT / 'python'}"
        base |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo"}
        try:
            with socket.socket(socket.AF_UNIX) as listener, self._errors.open("ab") as errors:
                listener.bind(address)
                listener.listen(2)
                listener.settimeout(START_SECONDS)
                if launcher is None:
                    launches = [(command, base | environment) for environment in _torchrun_environments()]
                else:
                    launches = [([*launcher, *command], base)]
                for launched, environment in launches:
                    self._processes.append(
                        subprocess.Popen(
                            launched, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors
                        )
                    )
                for _ in range(2):
                    connection, _ = listener.accept()
                    connection.settimeout(START_SECONDS)
                    stream = connection.makefile("rw")
                    rank = json.loads(stream.readline() or "null")["rank"]
                    self._connections[rank], self._streams[rank] = connection, stream
        except (OSError, TypeError) as error:
            text = self._said()
            self.close()
            raise PairError(f"the ranks of {kind!r} did not start: {error}\n{text}") from error

    def ask(self, *, limit: float = 30.0, **command: Any) -> list[Any]:
        """Tell both the same; what each answers, rank 0 first.

        Raises:
            PairError: One of them failed, or took longer than ``limit``, in seconds.
        """
        try:
            for connection, stream in zip(self._connections, self._streams, strict=True):
                connection.settimeout(limit)
                stream.write(json.dumps(command) + "\n")
                stream.flush()
            return [json.loads(stream.readline()) for stream in self._streams]
        except (OSError, ValueError) as error:
            raise PairError(f"the ranks of {self.kind!r} failed at {command}: {error!r}\n{self._said()}") from error

    def _said(self) -> str:
        return self._errors.read_text(errors="replace")[-4000:] if self._errors.exists() else ""

    def close(self) -> None:
        """End both."""
        for stream, connection in zip(self._streams, self._connections, strict=True):
            for one in (stream, connection):
                if one is not None:
                    with contextlib.suppress(OSError):
                        one.close()
        for process in self._processes:  # the end of the connection ends a rank that waits for its next command
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.terminate()
                try:
                    process.wait(3.0)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        self._folder.cleanup()

    def __enter__(self) -> Pair:
        """For a ``with`` block that ends the processes."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End both."""
        self.close()


def _torchrun_environments() -> list[dict[str, str]]:
    port = str(free_port())
    same = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{**same, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
