"""Several ranks of a job in one process: real runtimes, execution servers and schedules, over in-process connections.

At most one thread of all ranks runs Python at a time, because torch keeps settings and generators for the whole
process: a thread gives its turn away while it waits in its execution server. Settings are those of the rank whose turn
it is.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, TypeVar

import pytest
import shardwright.model.placement
from shardwright import _core, guards
from shardwright.config import load_config
from shardwright.errors import PeerLostError
from shardwright.execution import process
from shardwright.execution.frame_table import FrameTable
from shardwright.execution.results import sites_of
from shardwright.execution.state_order import StateOrder
from shardwright.execution.worker import WorkerPool
from shardwright.job.runtime import Runtime, set_current_runtime
from shardwright.scheduling import Scheduling

from tests.jobs.patience import HANG_SECONDS
from tests.jobs.runtimes import make_runtime

T = TypeVar("T")

#: No test waits for it: ranks of one process are slow where that has little of the processor.
_STALL_SECONDS = 300.0
_WAITS = (
    *("await_backward", "begin_step", "check_abort", "end_step", "enter_state", "leave_step", "supervise", "unwind"),
    *("recv_object", "wait"),
)


def _settings() -> tuple[process.Settings, process.RandomState]:
    return process.settings(), process.random_state()


def _restore(settings: tuple[process.Settings, process.RandomState]) -> None:
    process.restore_settings(settings[0])
    process.restore_random_state(settings[1])


class Turn:
    """The right to run Python for a rank, under the settings and generators that it left when it last had it."""

    def __init__(self, lock: threading.Lock) -> None:
        """Share ``lock`` with the other ranks."""
        self._lock = lock
        self._own = threading.local()
        self.start()

    def start(self) -> None:
        """Have the settings of the caller, which are in place again whenever no rank has its turn."""
        self._outside = self._settings = _settings()

    def take(self) -> None:
        if not getattr(self._own, "held", False):
            self._lock.acquire()
            self._own.held = True
            _restore(self._settings)

    def give(self) -> bool:
        """Give it away; whether this thread had it."""
        held = getattr(self._own, "held", False)
        if held:
            self._settings = _settings()
            _restore(self._outside)
            self._own.held = False
            self._lock.release()
        return held


class _TakingTurns:
    """An execution server, or a connection, whose waits give the turn away."""

    def __init__(self, waiting: Any, turn: Turn) -> None:
        self._server = waiting
        self._turn = turn
        for name in _WAITS:
            if hasattr(waiting, name):
                setattr(self, name, functools.partial(self._waiting, getattr(waiting, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def _waiting(self, method: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        held = self._turn.give()
        try:
            return method(*args, **kwargs)
        finally:
            if held:
                self._turn.take()

    def next_task(self, worker: int) -> Any:
        """A worker thread asks for its next task; it ends when there is none."""
        self._turn.give()
        task = self._server.next_task(worker)
        if task is not None:
            self._turn.take()
        return task


def connected(num_ranks: int, faults: str | None) -> list[_core.Node]:
    """Nodes of ranks of this process; those with faults are in no wheel, and so not in the extension's stub."""
    if faults is None:
        return _core.Node.in_process(num_ranks)
    connect: Callable[[int, str], list[_core.Node]] = attrgetter("in_process_with_faults")(_core.Node)
    return connect(num_ranks, faults)


class Job:
    """A pipeline of several ranks; one program after another runs on it."""

    def __init__(self, num_ranks: int, faults: str | None = None) -> None:
        """Connect the ranks, with ``faults`` as ``Node.in_process_with_faults`` takes them."""
        self.num_ranks = num_ranks
        self.has_faults = faults is not None
        self._lock = threading.Lock()
        self.turns = [Turn(self._lock) for _ in range(num_ranks)]
        self.runtimes = []
        for rank, node in enumerate(connected(num_ranks, faults)):
            server = _core.Server.attach(
                node,
                rank=rank,
                host="here",
                pp_ranks=list(range(num_ranks)),
                tp_ranks=[rank],
                stall_report_seconds=_STALL_SECONDS,
                stall_timeout_seconds=_STALL_SECONDS,
                trace_capacity=1,
            )
            waits = {"node": node, "server": server}
            taking_turns = {name: _TakingTurns(waiting, self.turns[rank]) for name, waiting in waits.items()}
            self.runtimes.append(make_runtime(rank, num_ranks, pp_size=num_ranks, ddp=False, **taking_turns))

    def run(
        self, main: Callable[[Runtime], T], settings: dict[str, Any], seconds: float = HANG_SECONDS
    ) -> list[T | BaseException]:
        """Run ``main`` on every rank.

        Args:
            main: What a script does, the same on every rank.
            settings: Configuration keys for this run.
            seconds: How long they may take.

        Returns:
            What each rank returned or raised.

        Raises:
            TimeoutError: A rank hangs; the job is of no use any more. Names what the others raised.
            AssertionError: A rank took part in fewer steps than another.
        """
        cfg = load_config({"pipeline_parallel_degree": self.num_ranks, "ddp": False, **settings}, {}, {})
        results: dict[int, T | BaseException] = {}
        threads = []
        for turn in self.turns:
            turn.start()
        for rank, runtime in enumerate(self.runtimes):
            place = runtime.place = dataclasses.replace(runtime.place, cfg=cfg)
            runtime.step.num_microbatches = cfg.microbatches
            for part in (sites_of(cfg), StateOrder(), Scheduling(cfg, place.pp_rank, place.pp_size)):
                runtime.add(part)
            run = functools.partial(contextvars.copy_context().run, self._main, runtime, main, results)
            threads.append(threading.Thread(target=run, name=f"rank-{rank}", daemon=True))  # a hanging one ends with us
            threads[-1].start()
        deadline = time.monotonic() + seconds
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        hanging = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        if hanging:
            raised = [f"rank {rank}: {result!r}" for rank, result in results.items() if isinstance(result, Exception)]
            raise TimeoutError(f"ranks {hanging} did not come to an end within {seconds:.0f} seconds; {raised}")
        with self._lock:  # settings are the caller's again, even if a worker was still at the end of its task
            steps = [runtime.step.number for runtime in self.runtimes]
        # Of a rank that is lost by a planted fault some hear before their next step, others in it.
        is_lost = self.has_faults and any(isinstance(result, PeerLostError) for result in results.values())
        if len(set(steps)) > 1 and not is_lost:
            raise AssertionError(f"the ranks are in steps {steps}: {results}")
        return [results[rank] for rank in range(self.num_ranks)]

    def _main(self, runtime: Runtime, main: Callable[[Runtime], T], results: dict[int, T | BaseException]) -> None:
        turn = self.turns[runtime.place.rank]
        turn.take()
        try:
            set_current_runtime(runtime)
            results[runtime.place.rank] = main(runtime)
        except BaseException as error:
            results[runtime.place.rank] = error
        finally:
            turn.give()

    @property
    def rests(self) -> bool:
        """Whether nothing is left of the last step on any rank: no frame, no request."""
        return all(
            not len(runtime[FrameTable])
            and not runtime[FrameTable].unclosed
            and not runtime.server.stats()["live_requests"]
            for runtime in self.runtimes
        )

    def sent(self) -> dict[str, int]:
        """How many requests of each kind the ranks sent in their last step."""
        total: dict[str, int] = {}
        for runtime in self.runtimes:
            for kind, count in runtime.server.stats()["step"]["sent"].items():
                total[kind] = total.get(kind, 0) + count
        return total

    def close(self) -> None:
        """Leave in good order."""
        for runtime in self.runtimes:
            runtime.server.close()
        for runtime in self.runtimes:
            runtime[WorkerPool].join(10.0)
            runtime.node.close()
            runtime.installed.close()


@contextmanager
def in_process_ranks() -> Iterator[None]:
    """What a process with several ranks has in place, less the tables of partitions that each would print."""
    announce = shardwright.model.placement.announce
    shardwright.model.placement.announce = lambda decision: None
    try:
        with guards.installed(num_ranks=2, pipelined=True, divided=True):
            yield
    finally:
        shardwright.model.placement.announce = announce


def job_fixture(num_ranks: int) -> Any:
    """A fixture for a module's tests: the job of several ranks on which they run, one after another."""

    @pytest.fixture(scope="module")
    def job() -> Iterator[Job]:
        with in_process_ranks():
            made = Job(num_ranks)
            yield made
            made.close()

    return job
