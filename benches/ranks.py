"""Ranks of one kind that measure something, told from another process what to do next."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
START_SECONDS = 60.0
_CLEARED = ("OMPI_", "PMIX_", "SLURM_", "TORCHELASTIC_", "SHARDWRIGHT_", "SM_HP_", "UCX_")


class RanksError(Exception):
    """Ranks did not start, or did not do what they were told."""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def result_of_pair(
    arguments: list[str], seconds: float, environment: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """What rank 0 of a fresh job of two ranks prints as its last line, in JSON.

    Args:
        arguments: Of Python, for both ranks.
        seconds: The most that the job may take.
        environment: Variables that the ranks have besides.

    Raises:
        SystemExit: A rank failed; it has said why.
    """
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    base = {**os.environ, **job, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'python'}"}
    base |= environment
    processes = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=ROOT,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        written, _ = processes[0].communicate(timeout=seconds)
        if any(process.wait(20) for process in processes):
            raise SystemExit("a rank failed; see above")
    finally:
        for process in processes:
            process.kill()
    found: dict[str, Any] = json.loads(written.splitlines()[-1])
    return found


class Ranks:
    """The processes of one job; each runs :func:`serve`.

    They sleep in the kernel until they are told something, so that jobs that wait take nothing from the one measured.
    """

    def __init__(
        self,
        module: str,
        kind: str,
        num_ranks: int = 2,
        python: Path | None = None,
        launcher: list[str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start them: a process each, or one launcher that starts all.

        Args:
            module: What they run, with the kind and the path of a socket as arguments.
            kind: Its first argument.
            num_ranks: How many.
            python: The interpreter, this one by default.
            launcher: A command that runs the rest of its command line as every rank.
            environment: Variables that they have besides.
        """
        self.kind = kind
        self._folder = tempfile.TemporaryDirectory(prefix="bench-")
        folder = Path(self._folder.name)
        self._errors = folder / "errors"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Any] = [None] * num_ranks
        self._streams: list[Any] = [None] * num_ranks
        address = str(folder / "control")
        command = [str(python or sys.executable), "-m", module, kind, address]
        base = {name: value for name, value in os.environ.items() if not name.startswith(_CLEARED)}
        paths = f"{ROOT}:{ROOT / 'python'}"
        base |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo"}
        base |= environment or {}
        try:
            with socket.socket(socket.AF_UNIX) as listener, self._errors.open("ab") as errors:
                listener.bind(address)
                listener.listen(num_ranks)
                listener.settimeout(START_SECONDS)
                if launcher is None:
                    launches = [(command, base | of_rank) for of_rank in _torchrun_environments(num_ranks)]
                else:
                    launches = [([*launcher, *command], base)]
                for launched, variables in launches:
                    self._processes.append(
                        subprocess.Popen(
                            launched, env=variables, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors
                        )
                    )
                for _ in range(num_ranks):
                    connection, _ = listener.accept()
                    connection.settimeout(START_SECONDS)
                    stream = connection.makefile("rw")
                    rank = json.loads(stream.readline() or "null")["rank"]
                    self._connections[rank], self._streams[rank] = connection, stream
        except (OSError, TypeError) as error:
            text = self._said()
            self.close()
            raise RanksError(f"the ranks of {kind!r} did not start: {error}\n{text}") from error

    def ask(self, *, limit: float = 30.0, **command: Any) -> list[Any]:
        """Tell all the same; what each answers, rank 0 first.

        Raises:
            RanksError: One of them failed, or took longer than ``limit``, in seconds.
        """
        try:
            for connection, stream in zip(self._connections, self._streams, strict=True):
                connection.settimeout(limit)
                stream.write(json.dumps(command) + "\n")
                stream.flush()
            return [json.loads(stream.readline()) for stream in self._streams]
        except (OSError, ValueError) as error:
            raise RanksError(f"the ranks of {self.kind!r} failed at {command}: {error!r}\n{self._said()}") from error

    def _said(self) -> str:
        return self._errors.read_text(errors="replace")[-4000:] if self._errors.exists() else ""

    def close(self) -> None:
        """End them."""
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

    def __enter__(self) -> Ranks:
        """For a ``with`` block that ends the processes."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End them."""
        self.close()


def serve(served: Any, address: str) -> None:
    """Do as :meth:`Ranks.ask` tells: ``do`` names a method, the rest are its arguments; close at the end.

    Args:
        served: Has ``rank`` and ``close``, and the methods.
        address: The path of the Unix socket.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        with connection.makefile("rw") as stream:

            def say(value: Any) -> None:
                stream.write(json.dumps(value) + "\n")
                stream.flush()

            say({"rank": served.rank})
            for line in stream:
                command = json.loads(line)
                say(getattr(served, command.pop("do"))(**command))
    served.close()


def _torchrun_environments(num_ranks: int) -> list[dict[str, str]]:
    port = str(free_port())
    world = str(num_ranks)
    same = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{**same, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
