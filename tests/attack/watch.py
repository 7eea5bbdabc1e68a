"""Watches the ranks of a job while it is attacked: their memory, where they listen, and whether they stay exact."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

from tests.jobs.job import Job, Process
from tests.jobs.listeners import listeners

from .protocol import CHALLENGE_BYTES, hello, read

#: What the ranks of an attacked job run.
PROGRAM = str(Path(__file__).with_name("training"))
TOLERANCE = 1e-10
#: Steps after which allocators and buffers are used to the work.
WARM_STEPS = 30
STEP_SECONDS = 60.0
_PAUSE = 0.02
#: A door answers at once.
_GREETING_SECONDS = 2.0


def anonymous_mb(pid: int) -> float:
    """The memory of its own that a process holds; shared buffers are not among it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    return 0.0


class Watch:
    """What was seen of a job since it was warm.

    Attributes:
        growth_mb: By how much the memory of the worst rank has grown, at its largest.
        outside: Listeners that other hosts could reach; None for a job that spans hosts.
    """

    def __init__(self, job: Job, *, one_host: bool = True) -> None:
        self.job = job
        self.growth_mb = 0.0
        self.outside = 0
        self._one_host = one_host
        job.events("step", STEP_SECONDS, WARM_STEPS)
        self._before = {process.pid: anonymous_mb(process.pid) for process in job.ranks}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Watch:
        self.look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(_PAUSE):
            for pid, before in self._before.items():
                try:
                    self.growth_mb = max(self.growth_mb, anonymous_mb(pid) - before)
                except OSError:
                    return

    def look(self) -> None:
        """Count listeners that others could reach."""
        if self._one_host:
            found = [place for process in self.job.ranks for place in listeners(process.pid)]
            self.outside = max(self.outside, sum(not address.is_loopback for address, _ in found))

    def steps(self) -> list[int]:
        """How many steps each rank has done."""
        return [len(process.events("step")) for process in self.job.ranks]

    def goes_on(self, before: list[int]) -> bool:
        """Whether every rank does further steps, all of them exact."""
        try:
            for process, number in zip(self.job.ranks, before, strict=True):
                process.event("step", STEP_SECONDS, number + 2)
        except AssertionError:
            return False
        self.look()
        return not self.inexact()

    def inexact(self) -> int:
        """How many steps of the job differ from plain PyTorch's."""
        steps = [step for process in self.job.ranks for step in process.events("step")]
        return sum(step["error"] > TOLERANCE for step in steps)


def doors(process: Process) -> list[tuple[str, int]]:
    """Where a process answers the handshake of the library; torch's own ports do not."""
    places = [(str(address), port) for address, port in listeners(process.pid)]
    return [place for place in places if _greets(place)]


def _greets(place: tuple[str, int]) -> bool:
    with socket.create_connection(place, _GREETING_SECONDS) as stream:
        stream.sendall(hello())
        return len(read(stream, CHALLENGE_BYTES)) == CHALLENGE_BYTES
