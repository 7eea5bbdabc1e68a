"""What a rank waits for, from which the core proves that ranks wait for one another and none can ever go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from shardwright.data_parallel.collectives import ReplicaCollectives
from shardwright.job.runtime import Runtime

#: If a step has not moved for this long after a message arrived, the message had no effect.
_SETTLED_SECONDS = 0.2

WaitId = tuple[str, int]
"""Identifies a wait."""


Collective = tuple[list[int], int]
"""The participating ranks, and the index of the collective among theirs."""


class WaitState(NamedTuple):
    """What a rank waits for.

    Attributes:
        wait_id: The wait, if only another rank can end it; else None.
        collective: The collective that is waited for. It ends without a message, once all participants have begun it.
        begun: The number of collectives that this rank has begun, by group.
        last_checked: The beginning of the last check that did not end the wait, in monotonic seconds.
        seconds: How long this rank has seen no progress.
    """

    wait_id: WaitId | None
    collective: Collective | None = None
    begun: Sequence[Collective] = ()
    last_checked: float = 0.0
    seconds: float = 0.0


def wait_state_of(runtime: Runtime) -> WaitState:
    """What this rank waits for and cannot get by itself.

    Where the script runs threads, one of them may yet send what another rank waits for, so nothing is said. Threads of
    the library and daemons (loaders of data, progress bars) do not count.
    """
    if any(thread is not threading.main_thread() and not thread.daemon for thread in threading.enumerate()):
        return WaitState(None)
    begun = [(collectives.ranks, collectives.begun) for collectives in runtime[ReplicaCollectives].all]
    if runtime.waits:  # of a task, too: it has its rank's turn, so no other one runs
        wait = runtime.waits[-1]
        if not wait.ends_by_message and wait.collective is None:
            return WaitState(None)
        return WaitState(("wait", wait.number), wait.collective, begun, wait.last_checked, wait.seconds)
    idle = runtime.server.idle_in_step() if runtime.step.running else None
    if idle is None:
        return WaitState(None)
    progress, seconds = idle
    last_checked = time.monotonic() - _SETTLED_SECONDS if seconds >= _SETTLED_SECONDS else 0.0
    return WaitState(("step", progress), None, begun, last_checked, runtime.server.quiet())
