"""Jobs of real processes for tests: started, watched and ended with a deadline for everything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from .forked import Forked
from .patience import HANG_SECONDS, Patience
from .ports import next_port

#: Where programs are that are named without a folder.
PROGRAMS = Path(__file__).parents[1] / "failures" / "programs"
#: How long the ranks may take to end after one of them has failed; on an idle machine, as all limits here are.
END_SECONDS = 10.0

_MARK = "SHARDWRIGHT_TEST_JOB"
_MAX_LINES = 5_000
_CLEARED = ("OMPI_", "SLURM_", "TORCHELASTIC_", "SHARDWRIGHT_", "SM_HP_")
_LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def torchrun_environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun sets."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def forked(command: list[str], environment: Mapping[str, str]) -> Forked:
    """A rank that is forked: a script and its arguments."""
    return Forked(command, environment, stdin=subprocess.PIPE, session=True)


def started(command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """A process that is started as users start theirs: a whole command line."""
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
        start_new_session=True,
    )


class Process:
    """One process, whose output is read as it comes, up to a limit."""

    def __init__(self, process: subprocess.Popen[str] | Forked) -> None:
        self._process = process
        self._news = threading.Condition()
        self._signals: set[int] = set()
        self._streams: dict[str, list[str]] = {"out": [], "err": []}
        self._threads = [
            threading.Thread(target=self._read, args=(name, stream), daemon=True)
            for name, stream in (("out", self._process.stdout), ("err", self._process.stderr))
        ]
        for thread in tuple(self._threads):  # the first may have ended, and be taken out, before the second starts
            thread.start()

    def _read(self, name: str, stream: Any) -> None:
        try:
            for line in stream:
                with self._news:
                    if len(self._streams[name]) < _MAX_LINES:
                        self._streams[name].append(line)
                    self._news.notify_all()
        finally:
            with self._news:
                self._threads.remove(threading.current_thread())
                self._news.notify_all()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def out(self) -> str:
        """What it has written to standard output."""
        with self._news:
            return "".join(self._streams["out"])

    @property
    def err(self) -> str:
        """What it has written to standard error."""
        with self._news:
            return "".join(self._streams["err"])

    def events(self, name: str) -> list[dict[str, Any]]:
        """The events of this name so far."""
        with self._news:
            lines = [line for line in self._streams["out"] if line.startswith('{"event"')]
        return [event for line in lines if (event := json.loads(line))["event"] == name]

    def wait_for(self, what: str, found: Callable[[], Any], limit: float) -> Any:
        """Wait until ``found`` finds something in the output."""
        patience = Patience(limit)
        with self._news:
            while not (result := found()):
                if patience.is_over or (not self._threads and self._process.poll() is not None):
                    text = "".join(self._streams["out"] + self._streams["err"])[-4000:]
                    raise AssertionError(f"no {what} in {patience} (exit code {self._process.poll()}):\n{text}")
                self._news.wait(min(limit, 1.0))
        return result

    def event(self, name: str, limit: float = HANG_SECONDS, number: int = 0) -> dict[str, Any]:
        """Wait for an event, the ``number``-th of this name."""
        events: list[dict[str, Any]] = self.wait_for(
            f"event {name!r}", lambda: self.events(name)[number : number + 1], limit
        )
        return events[0]

    def tell(self, text: str = "go on") -> None:
        """Write a line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._signals.add(number)
        self._process.send_signal(number)

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to it and all that it started, as a terminal does."""
        os.killpg(self._process.pid, number)

    def wait(self, limit: float) -> int:
        """Wait for its end; the exit code."""
        return self._process.wait(limit)

    def ends_within(self, seconds: float) -> bool:
        """Whether it ends meanwhile."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(seconds)
        return not self.is_running()

    def drained(self, limit: float = HANG_SECONDS) -> None:
        """Wait until all its output is read."""
        deadline = time.monotonic() + limit
        with self._news:
            while self._threads and (left := deadline - time.monotonic()) > 0:
                self._news.wait(left)

    def crashed(self) -> bool:
        """Whether it aborted or faulted, and this test did not make it."""
        code = self._process.poll()
        return (
            code is not None and -code in {signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL} - self._signals
        )

    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None


def threads_of(pid: int) -> str:
    """Each thread of a process, and what it waits for in the kernel: a line each."""
    lines = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        with suppress(OSError):  # it has ended
            name, state = (task / "comm").read_text().strip(), (task / "stat").read_text().rpartition(")")[2].split()[0]
            waits, call = (task / "wchan").read_text(), (task / "syscall").read_text().split()[0]
            lines.append(f"thread {task.name} {name}: {state}, {waits or '-'}, system call {call}\n")
    return "".join(lines)


class Job:
    """The ranks of a job, each a process of its own.

    Attributes:
        ranks: The processes; of a launcher there is one.
        port: Where torch's store listens, on rank 0; a launcher has its own.
    """

    def __init__(
        self,
        program: str,
        ranks: int = 2,
        arguments: Iterable[str] = (),
        environment: Callable[[int], Mapping[str, str]] = lambda rank: {},
        launcher: list[str] | None = None,
        launch: Callable[[int, int, int], Mapping[str, str]] = torchrun_environment,
        prefix: Callable[[int], list[str]] | None = None,
    ) -> None:
        self._mark = uuid.uuid4().hex
        base = {
            name: value for name, value in os.environ.items() if not name.startswith(_CLEARED) and name not in _LAUNCH
        }
        base |= {_MARK: self._mark, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        script = [str(PROGRAMS / f"{program}.py"), *arguments]
        self.ranks: list[Process] = []
        if launcher is not None:
            self.ranks.append(Process(started([*launcher, *script], {**base, **environment(0)})))
            return
        self.port = port = next_port()
        for rank in range(ranks):
            own = {**base, **launch(rank, ranks, port), **environment(rank)}
            if prefix is None:
                self.ranks.append(Process(forked(script, own)))
            else:
                self.ranks.append(Process(started([*prefix(rank), sys.executable, *script], own)))

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.processes():
            with suppress(ProcessLookupError):  # it has ended since it was found
                os.kill(pid, signal.SIGKILL)
        for process in self.ranks:
            process.wait(10.0)

    def __getitem__(self, rank: int) -> Process:
        return self.ranks[rank]

    def processes(self) -> list[int]:
        """The ids of all living processes of this job, children of the ranks included.

        Each rank leads a session; a launcher's ranks, which have their own, are known by their environment.
        """
        sessions = {process.pid for process in self.ranks}
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                environment = (entry / "environ").read_bytes()
                state, _, _, session, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            is_ours = int(session) in sessions or f"{_MARK}={self._mark}".encode() in environment.split(b"\0")
            if is_ours and state not in "ZX":
                found.append(int(entry.name))
        return found

    def events(self, name: str, limit: float = HANG_SECONDS, number: int = 0) -> list[dict[str, Any]]:
        """The ``number``-th event of this name of every rank."""
        return [process.event(name, limit, number) for process in self.ranks]

    def all_end_with(self, expected: list[int], limit: float = END_SECONDS, but: Iterable[int] = ()) -> None:
        """Wait until all processes have ended, with these exit codes; an error shows what the ranks wrote."""
        codes = self.all_end(limit, but)
        written = "".join(f"rank {rank}:\n{process.out}{process.err}" for rank, process in enumerate(self.ranks))
        assert codes == expected, written

    def all_end(self, limit: float = END_SECONDS, but: Iterable[int] = ()) -> list[int]:
        """Wait until all processes have ended, children included; the ranks' exit codes.

        Args:
            limit: In how many seconds.
            but: Ranks that need not end.
        """
        patience = Patience(limit)
        waited_for = [process for rank, process in enumerate(self.ranks) if rank not in but]
        for process in waited_for:
            while not process.ends_within(min(limit, 1.0)):
                if patience.is_over:
                    written = f"{process.out}{process.err}{threads_of(process.pid)}"
                    raise AssertionError(f"a rank is alive after {patience}:\n{written}")
        for process in waited_for:
            process.drained()
            assert not process.crashed(), f"a rank crashed ({process.wait(1.0)}):\n{process.out}{process.err}"
        spared = {self.ranks[rank].pid for rank in but}
        assert set(self.processes()) <= spared, "a process was left behind"
        return [process.wait(1.0) for process in waited_for]
