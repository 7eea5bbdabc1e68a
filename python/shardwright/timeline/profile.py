"""``smp.profile``: PyTorch's profiler on all ranks, and one trace of what it has seen."""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerAction, ProfilerActivity

from shardwright import _core
from shardwright.errors import ConfigError, ShardwrightError
from shardwright.job.objects import gathered, tell_gathering
from shardwright.job.ranks import WORLD
from shardwright.job.runtime import Runtime, current_runtime
from shardwright.timeline.parts import collect
from shardwright.timeline.trace import TraceRecorder, warn_of_lost

_OPERATION = "smp.profile"
_RECORDING = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
#: The trace's clock begins so long before the block, as clocks of hosts may differ, and no event may come before it.
_HOUR_NS = 3600 * 10**9


class _Recorder(TraceRecorder):
    """Records the steps in which the profiler does."""

    called = _OPERATION

    def begin_step(self) -> None:
        """Begin a step; the profiler's schedule has said whether it is recorded."""


class profile(torch.profiler.profile):  # named as torch's
    """``torch.profiler.profile`` over all ranks: what every rank computes and waits for, in one trace.

    All ranks have to call this, and :meth:`step`, alike and outside of step functions. Each rank profiles all of its
    threads, so that the operators of worker threads are seen. At the end of each cycle of the schedule, rank 0 gets the
    traces of all ranks and puts them together: a process for each rank, on one clock, with the rank's tasks, waits and
    messages beside its operators. Results of steps do not change.

    If an exception leaves the block, the cycle in progress is dropped, on all ranks.

    Args:
        activities: As ``torch.profiler.profile`` has it, and so are the others.
        schedule: Which steps are recorded; ``torch.profiler.schedule`` makes one.
        on_trace_ready: Is called on every rank with the profile when a cycle has ended.
        record_shapes: Record the shapes of operators' inputs.
        profile_memory: Record allocations; without a pipeline only.
        with_stack: Record lines of Python.
        with_flops: Estimate operations of matrix multiplications and convolutions.
        with_modules: Record modules of TorchScript.
        acc_events: Keep events of earlier cycles for :meth:`key_averages`.

    Raises:
        ConfigError: ``profile_memory`` over a pipeline, or a version of torch that cannot profile all threads.
        ShardwrightError: ``smp.init`` has not been called.
    """

    def __init__(
        self,
        *,
        activities: Iterable[ProfilerActivity] | None = None,
        schedule: Callable[[int], ProfilerAction] | None = None,
        on_trace_ready: Callable[..., Any] | None = None,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        with_flops: bool = False,
        with_modules: bool = False,
        acc_events: bool = False,
    ) -> None:
        """Prepare the profile of a rank."""
        self._runtime = current_runtime()
        super().__init__(
            activities=activities,
            schedule=schedule,
            on_trace_ready=self._end_cycle,
            record_shapes=record_shapes,
            profile_memory=profile_memory,
            with_stack=with_stack,
            with_flops=with_flops,
            with_modules=with_modules,
            experimental_config=_of_all_threads(self._runtime, profile_memory),
            acc_events=acc_events,
        )
        self._handler = on_trace_ready
        self._recorder = _Recorder(self._runtime, None)
        self._origin_ns = 0
        self._num_cycles = 0
        self._failed = False
        self._folder: Path | None = None

    def start(self) -> None:
        """Start; a ``with`` block does it.

        Raises:
            ShardwrightError: Called in a step function, inside another ``smp.profile`` or ``smp.trace``, or while
                another profiler of torch is active; on all ranks, if that is so on one.
        """
        runtime = self._runtime
        runtime.check_process(_OPERATION)
        if runtime.step.running:
            raise ShardwrightError(f"{_OPERATION} was called in a step function; put it around the call of the step")
        told = gathered(_OPERATION, (self._obstacle(), time.time_ns()), WORLD)
        _raise_of({rank: obstacle for rank, (obstacle, _) in enumerate(told)})
        self._origin_ns = told[0][1] - _HOUR_NS
        self._folder = Path(tempfile.mkdtemp(prefix="shardwright-profile-"))
        weakref.finalize(self, _remove, self._folder, os.getpid())
        runtime.add(self._recorder, TraceRecorder)
        try:
            super().start()
            self._record()
        except BaseException as error:
            self._abandon(error)
            raise

    def step(self) -> None:
        """Tell that the next step of the schedule begins, on all ranks.

        Raises:
            ShardwrightError: Called in a step function, or a rank's trace could not be taken.
        """
        if self._runtime.step.running:
            raise ShardwrightError("the step() of smp.profile was called in a step function; call it after the step")
        super().step()
        self._record()

    def stop(self) -> None:
        """Stop, and end the cycle in progress; the end of a ``with`` block does it."""
        try:
            super().stop()
        finally:
            self._recorder.record(False)
            if self._runtime.find(TraceRecorder) is self._recorder:
                self._runtime.remove(TraceRecorder)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the block; of one that an exception leaves, the cycle in progress is dropped."""
        if error is not None:
            self._abandon(error)
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def export_chrome_trace(self, path: str) -> None:
        """Write the trace of all ranks of the newest cycle, on rank 0; other ranks do nothing.

        Args:
            path: The file, for Perfetto. It is there only once it is complete. One that ends in ``.gz`` is compressed.

        Raises:
            ShardwrightError: No cycle has ended.
        """
        if self._num_cycles == 0:
            raise ShardwrightError(
                "smp.profile has no trace: no cycle of its schedule has ended, or an exception left its block"
            )
        if self._runtime.place.rank > 0:
            return
        assert self._folder is not None, "a cycle has ended"
        path = os.fspath(path)
        beside = f"{path}.{os.getpid()}.new"
        try:
            write: Callable[..., Any] = gzip.open if path.endswith(".gz") else open
            with write(beside, "wb") as target, open(self._folder / "trace.json", "rb") as source:
                shutil.copyfileobj(source, target)
            os.replace(beside, path)
        except BaseException:
            Path(beside).unlink(missing_ok=True)
            raise

    def _obstacle(self) -> str:
        """Why this rank cannot start; empty if it can."""
        active = self._runtime.find(TraceRecorder)
        if active is not None:
            return f"was called inside {active.called}; {_OPERATION} and smp.trace do not nest"
        if _profiler_enabled():
            return "was called while another profiler of torch is active in its thread; end that one first"
        return ""

    def _record(self) -> None:
        self._recorder.record(self.current_action in _RECORDING)

    def _abandon(self, error: BaseException) -> None:
        """Drop the cycle in progress, and tell the ranks that wait for it."""
        if not self._failed:
            self._failed = True
            tell_gathering(_OPERATION, (f"left its block with {type(error).__name__}: {error}", 0), WORLD)
        if self._runtime.find(TraceRecorder) is self._recorder:
            self._recorder.record(False)
            self._runtime.remove(TraceRecorder)

    def _end_cycle(self, _profile: torch.profiler.profile) -> None:
        """Take the traces of all ranks together, on rank 0, and let the script know."""
        if self._failed:
            return
        assert self._folder is not None, "it has been started"
        problem, failed = "", None
        part = self._folder / f"part_{self._runtime.place.rank}.json"
        try:
            self._write_part(part)
        except Exception as error:  # the others have to hear of it
            problem, failed = f"could not take its trace: {type(error).__name__}: {error}", error
        told = gathered(_OPERATION, (problem, 0), WORLD)
        if failed is not None:
            raise failed
        _raise_of({rank: text for rank, (text, _) in enumerate(told)})
        collect(self._runtime, part, self._folder / "trace.json", self._origin_ns)
        self._num_cycles += 1
        if self._handler is not None:
            self._handler(self)

    def _write_part(self, part: Path) -> None:
        timeline = self._recorder.end()
        warn_of_lost(self._runtime, timeline)
        own = part.with_name("own.json")
        super().export_chrome_trace(str(own))
        place = self._runtime.place
        threads = threading.enumerate()
        _core.write_profile_part(
            own,
            part,
            rank=place.rank,
            name=f"rank {place.rank} (stage {place.pp_rank})",
            pid=os.getpid(),
            threads={each.native_id: each.name for each in threads if each.native_id is not None},
            timeline=timeline,
            origin_ns=self._origin_ns,
        )
        own.unlink()


def _of_all_threads(runtime: Runtime, profile_memory: bool) -> _ExperimentalConfig | None:
    """The profiler's settings: without a pipeline, all operators run on the thread that torch profiles by itself."""
    num_ranks = runtime.place.pp_size
    if num_ranks == 1:
        return None
    if profile_memory:
        raise ConfigError(
            f"smp.profile: profile_memory is True; allowed over a pipeline of {num_ranks} ranks: False, since torch "
            "reports memory of the thread that starts its profiler only. smp.memory_report() tells what fills each rank"
        )
    try:
        return _ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        raise ConfigError(
            f"smp.profile: torch {torch.__version__} cannot profile all threads of a rank, of which a pipeline of "
            f"{num_ranks} ranks has several; torch 2.7.0 and newer can"
        ) from None


def _remove(folder: Path, pid: int) -> None:
    """Remove the files of a profile, in the process that has made them: a forked one may end before it."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


def _raise_of(obstacles: dict[int, str]) -> None:
    found = [f"rank {rank} {text}" for rank, text in obstacles.items() if text]
    if found:
        raise ShardwrightError(f"{_OPERATION}: {'; '.join(found)}")
