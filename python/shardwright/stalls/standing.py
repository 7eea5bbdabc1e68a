"""What a rank waits for, from which the core proves that ranks wait for one another and none can ever go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from shardwright.data_parallel.collectives import ReplicaCollectives

if TYPE_CHECKING:
    from shardwright.job.runtime import Runtime

#: How long a step has to stand still after a message arrived, before the message has had no effect.
_SETTLED_SECONDS = 0.2

WaitMark = tuple[str, int]
"""Names a wait: another one has another mark."""


Collective = tuple[list[int], int]
"""The ranks that take part, and which one of theirs it is."""


class Standing(NamedTuple):
    """What a rank waits for.

    Attributes:
        mark: What it waits for and cannot get by itself; None where it does anything else.
        collective: The collective that this is for: the ranks that take part, and which one of theirs it is. It ends
            once all of them have begun it, without a message.
        begun: How many collectives this rank has begun, by group.
        looked: Since when it has looked in vain for that: all that had arrived by then was no help. Monotonic time.
        seconds: For how long nothing has happened, as far as it knows.
    """

    mark: WaitMark | None
    collective: Collective | None = None
    begun: Sequence[Collective] = ()
    looked: float = 0.0
    seconds: float = 0.0


def standing_of(runtime: Runtime) -> Standing:
    """What this rank waits for and cannot get by itself.

    Where the script runs threads, one of them may yet send what another rank waits for, so nothing is said. Threads of
    the library and daemons (loaders of data, progress bars) do not count.
    """
    if any(thread is not threading.main_thread() and not thread.daemon for thread in threading.enumerate()):
        return Standing(None)
    begun = [(collectives.ranks, collectives.begun) for collectives in runtime[ReplicaCollectives].all]
    if runtime.waits:  # of a task, too: it has its rank's turn, so no other one runs
        wait = runtime.waits[-1]
        if not wait.is_for_ever and wait.collective is None:
            return Standing(None)
        return Standing(("wait", wait.number), wait.collective, begun, wait.looked, wait.seconds)
    idle = runtime.server.idle_in_step() if runtime.step.running else None
    if idle is None:
        return Standing(None)
    progress, seconds = idle
    looked = time.monotonic() - _SETTLED_SECONDS if seconds >= _SETTLED_SECONDS else 0.0
    return Standing(("step", progress), None, begun, looked, runtime.server.quiet())
