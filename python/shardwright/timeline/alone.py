"""Records of a pipeline of one rank, whose microbatches run without the execution server."""

from __future__ import annotations

import time
from collections import deque
from typing import Literal

from shardwright.timeline.records import Record

_CAPACITY = 1 << 14  # records; some hundred steps


class AloneRecorder:
    """Keeps the newest microbatches' forward and backward times."""

    __slots__ = ("_kept", "_microbatch", "_start", "_step")

    def __init__(self) -> None:
        """Begin with nothing."""
        self._kept: deque[tuple[int, int, Literal["forward", "backward"], int, int]] = deque(maxlen=_CAPACITY)
        self._step = 0
        self._microbatch = 0
        self._start: int | None = None

    def begin(self, step: int, microbatch: int) -> None:
        """A microbatch of a step starts."""
        self._step, self._microbatch, self._start = step, microbatch, time.time_ns()

    def passed(self, phase: Literal["forward", "backward"]) -> None:
        """What ran since the last call was work of this phase."""
        if self._start is not None:
            now = time.time_ns()
            self._kept.append((self._step, self._microbatch, phase, self._start, now))
            self._start = now

    def end(self) -> None:
        """The microbatch is over."""
        self.passed("forward")
        self._start = None

    def take(self, rank: int) -> list[Record]:
        """The records since the last call, oldest first."""
        records: list[Record] = [
            {
                "rank": rank,
                "step": step,
                "kind": "root",
                "phase": phase,
                "microbatch": microbatch,
                "start_ns": start,
                "end_ns": end,
            }
            for step, microbatch, phase, start, end in self._kept
        ]
        self._kept.clear()
        return records
