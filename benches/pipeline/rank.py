"""One of the processes that measure, on one of two sides.

usage: python -m benches.pipeline.rank KIND SOCKET, where KIND is a name in ``KINDS``, as a rank of a job
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from typing import Protocol

from benches.pipeline.cases import CostKind, Schedule
from benches.ranks import serve

KINDS = {
    "shardwright": "benches.pipeline.our_side:Shardwright",
    "torch": "benches.pipeline.torch_side:TorchPipelining",
}
#: Of ours the first step divides the model, two more are recorded for static mode, and the next ones are measured to
#: choose the backwards that are split.
WARM_UP = 6


class Side(Protocol):
    """A rank of the library's or of torch's pipeline."""

    rank: int
    #: What it raises for a schedule that it does not have.
    refusal: type[Exception]

    def configure(self, schedule: Schedule) -> None:
        """Build the pipeline anew."""

    def prepare(self, kind: CostKind, unit_ms: float) -> None:
        """Set what the stages of the pipeline cost."""

    def step(self) -> None:
        """One training step, without an optimizer."""

    def zero_grad(self) -> None:
        """Forget the gradients."""

    def barrier(self) -> None:
        """Wait for the other ranks."""

    def ideal(self, schedule: Schedule, kind: CostKind, unit_ms: float) -> float:
        """The makespan of a schedule without any overhead, in seconds; of torch's, the configured one."""

    def close(self) -> None:
        """Leave."""


class Measuring:
    """What a rank can be told."""

    def __init__(self, side: Side) -> None:
        """Take the side over."""
        self._side = side
        self.rank = side.rank

    def configure(self, schedule: Schedule, kind: CostKind, unit_ms: float) -> str | None:
        """Build and warm up with these costs; or why the side has no such schedule."""
        try:
            self._side.configure(schedule)
        except self._side.refusal as error:
            return str(error)
        self._side.prepare(kind, unit_ms)
        for _ in range(WARM_UP):
            self._side.step()
            self._side.zero_grad()
        return None

    def ideal(self, schedule: Schedule, kind: CostKind, unit_ms: float) -> float:
        """See :meth:`Side.ideal`."""
        return self._side.ideal(schedule, kind, unit_ms)

    def steps(self, count: int) -> list[tuple[float, float]]:
        """When each step began and ended here, in seconds of a clock that the ranks of a host share."""
        taken = []
        for _ in range(count):
            self._side.barrier()
            began = time.monotonic()
            self._side.step()
            taken.append((began, time.monotonic()))
            self._side.zero_grad()
        return taken

    def close(self) -> None:
        """Leave."""
        self._side.close()


def main() -> None:
    kind, address = sys.argv[1:]
    # Each rank has its processor, so that two do not wait for one while the other idles.
    processors = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {processors[int(os.environ["RANK"]) % len(processors)]})
    module, _, name = KINDS[kind].partition(":")
    serve(Measuring(getattr(importlib.import_module(module), name)()), address)


if __name__ == "__main__":
    main()
