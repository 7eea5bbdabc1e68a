"""``smp.trace``: recording of steps on all ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch._C._autograd import _profiler_enabled

from shardwright import _core
from shardwright.errors import ConfigError, ShardwrightError
from shardwright.job.objects import receive_on, send_on
from shardwright.job.runtime import Runtime, current_runtime

_CHANNEL = "timeline"


class TraceSource(Protocol):
    """Records what a rank does beside its tasks."""

    def keep_trace(self, on: bool) -> None:
        """Keep records from now on, or keep none."""

    def take_trace(self) -> _core.Timeline:
        """Return the records since the last call."""


class TraceSources:
    """What records beside the tasks of a rank.

    Attributes:
        all: The sources.
    """

    def __init__(self) -> None:
        """Have none."""
        self.all: list[TraceSource] = []


class TraceRecorder:
    """Records steps for :func:`trace`.

    Attributes:
        timeline: The records of all ranks, on rank 0, after the block has ended; else None.
        called: What scripts call that records.
    """

    called = "smp.trace"

    def __init__(self, runtime: Runtime, steps: Collection[int] | None) -> None:
        """Create the recorder of a rank."""
        self.timeline: _core.Timeline | None = None
        self._runtime = runtime
        self._steps = steps
        self._begun = 0

    def begin_step(self) -> None:
        """Begin a step, and record it if it is selected."""
        self.record(self._steps is None or self._begun in self._steps)
        self._begun += 1

    def end(self) -> _core.Timeline:
        """Stop recording, and return the records of this rank."""
        self.record(False)
        taken: _core.Timeline
        if self._runtime.place.pp_size == 1:
            taken = self._runtime[_core.AloneRecorder].take_trace(self._runtime.place.rank)
        else:
            taken = self._runtime.server.take_trace()
        more = [source.take_trace().to_json() for source in self._runtime[TraceSources].all]
        return _core.Timeline.join([taken.to_json(), *more]) if more else taken

    def record(self, on: bool) -> None:
        """Record from now on, or not."""
        self._runtime.server.keep_trace(on)
        self._runtime[_core.AloneRecorder].keep_trace(on)
        for source in self._runtime[TraceSources].all:
            source.keep_trace(on)


@contextmanager
def trace(folder: str | Path | None = None, *, steps: Collection[int] | None = None) -> Iterator[TraceRecorder]:
    """Record what every rank does in the steps inside the block. All ranks must call this, between steps.

    At the end of the block, rank 0 writes ``trace.json`` for Perfetto and ``shardwright trace``, and ``timeline.html``
    for a browser. If an exception leaves the block, nothing is written. Can be used as a decorator, which records the
    steps of each call.

    Args:
        folder: The output folder, created if necessary. With None, nothing is written.
        steps: The steps to record, counted from 0 at the beginning of the block; None for all. Other steps have no
            overhead.

    Yields:
        The recorder; after the block, its ``timeline`` contains all records on rank 0.

    Raises:
        ConfigError: The folder is an address of an object store, or empty.
        ShardwrightError: Another trace or a profile is active, or this was called in a step function.
    """
    if folder is not None and _core.is_in_store(folder):
        raise ConfigError(f"smp.trace: folder is {str(folder)!r}; allowed: a folder on a disk, or None")
    runtime = current_runtime()
    if runtime.step.running:
        raise ShardwrightError("smp.trace was called in a step function; put it around the call of the step function")
    if (active := runtime.find(TraceRecorder)) is not None:
        other = "another smp.trace" if active.called == "smp.trace" else active.called
        raise ShardwrightError(f"smp.trace was called inside {other}; traces do not nest")
    traced = runtime.add(TraceRecorder(runtime, steps))
    try:
        yield traced
    except BaseException:
        traced.end()
        raise
    finally:
        runtime.remove(TraceRecorder)
    _gather(runtime, traced, traced.end(), folder)


def begin_step(runtime: Runtime) -> None:
    """Count a step; ranks stay in lockstep because all of them call every step function."""
    runtime.step.begin(training=torch.is_grad_enabled())
    if (traced := runtime.find(TraceRecorder)) is not None:
        traced.begin_step()
    elif runtime.place.pp_size > 1 and _profiler_enabled() and runtime.find(_PlainProfiler) is None:
        runtime.add(_PlainProfiler())
        runtime.logger.warning(
            "rank %d: torch.profiler sees the thread that started it, and this step runs on worker threads and on %d "
            "ranks: their operators are missing. smp.profile(...) takes the same arguments, and has them in one trace",
            runtime.place.rank,
            runtime.place.launch.world_size,
        )


class _PlainProfiler:
    """Is there once this rank has told what a profiler of torch does not see."""


def warn_of_lost(runtime: Runtime, own: _core.Timeline) -> None:
    """Tell of records that this rank had no room for."""
    if own.lost:
        runtime.logger.warning(
            "rank %d has lost %d records of the oldest steps that were traced: trace fewer steps",
            runtime.place.rank,
            own.lost,
        )


def _gather(runtime: Runtime, traced: TraceRecorder, own: _core.Timeline, folder: str | Path | None) -> None:
    warn_of_lost(runtime, own)
    if runtime.place.rank > 0:
        send_on(runtime, 0, _CHANNEL, own.to_json())
        return
    parts = [own.to_json()]
    parts += [receive_on(runtime, rank, _CHANNEL) for rank in range(1, runtime.place.launch.world_size)]
    traced.timeline = _core.Timeline.join(parts)
    if folder is not None:
        traced.timeline.write(folder)
        runtime.logger.info("timeline: %s and trace.json", Path(folder) / "timeline.html")
