"""``smp.trace``: records of the steps run inside, from all ranks, as files."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright import _core
from shardwright.errors import ShardwrightError
from shardwright.job.objects import receive_on, send_on
from shardwright.job.runtime import current_runtime

if TYPE_CHECKING:
    from shardwright.job.runtime import Runtime

_CHANNEL = "timeline"


class TraceRecorder:
    """What :func:`trace` records.

    Attributes:
        timeline: The records of all ranks, on rank 0, once the block has ended.
    """

    def __init__(self, runtime: Runtime, steps: Collection[int] | None) -> None:
        """Nothing is recorded yet."""
        self.timeline: _core.Timeline | None = None
        self._runtime = runtime
        self._steps = steps
        self._begun = 0

    def begin_step(self) -> None:
        """A step begins inside: record it, or not."""
        self._record(self._steps is None or self._begun in self._steps)
        self._begun += 1

    def end(self) -> _core.Timeline:
        """Record no more; what this rank has recorded."""
        self._record(False)
        return self._take()

    def _record(self, on: bool) -> None:
        self._runtime.server.keep_trace(on)
        self._runtime[_core.AloneRecorder].keep_trace(on)

    def _take(self) -> _core.Timeline:
        if self._runtime.place.pp_size == 1:
            return self._runtime[_core.AloneRecorder].take_trace(self._runtime.place.rank)
        taken: _core.Timeline = self._runtime.server.take_trace()
        return taken


@contextmanager
def trace(folder: str | Path | None = None, *, steps: Collection[int] | None = None) -> Iterator[TraceRecorder]:
    """Record what every rank does in the steps run inside the block; called by all ranks, between steps.

    When the block ends, rank 0 writes ``trace.json``, which Perfetto and ``shardwright trace`` read, and
    ``timeline.html``, a page for any browser. Nothing is written when an exception leaves the block. As a decorator it
    records the steps of each call.

    Args:
        folder: Where rank 0 writes; made if need be. With None nothing is written.
        steps: Which of the steps run inside are recorded, counted from 0; None for all. The others cost nothing.

    Yields:
        On rank 0, what has been recorded, once the block has ended.

    Raises:
        ShardwrightError: A trace is on already, or this was called in a step function.
    """
    runtime = current_runtime()
    if runtime.step.running:
        raise ShardwrightError("smp.trace was called in a step function; put it around the call of the step function")
    if runtime.find(TraceRecorder) is not None:
        raise ShardwrightError("smp.trace was called inside another smp.trace; traces do not nest")
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
    runtime.step.number += 1
    if (traced := runtime.find(TraceRecorder)) is not None:
        traced.begin_step()


def _gather(runtime: Runtime, traced: TraceRecorder, own: _core.Timeline, folder: str | Path | None) -> None:
    if own.lost:
        runtime.logger.warning(
            "rank %d has lost %d records of the oldest steps that were traced: trace fewer steps",
            runtime.place.rank,
            own.lost,
        )
    if runtime.place.rank > 0:
        send_on(runtime, 0, _CHANNEL, own.to_json())
        return
    parts = [own.to_json()]
    parts += [receive_on(runtime, rank, _CHANNEL) for rank in range(1, runtime.place.launch.world_size)]
    traced.timeline = _core.Timeline.join(parts)
    if folder is not None:
        traced.timeline.write(folder)
        runtime.logger.info("timeline: %s and trace.json", Path(folder) / "timeline.html")
