"""Deadlock detection: a proof that all ranks wait for one another.

Messages between two ranks arrive in the order in which they were sent. So once a rank has heard from every other one
that it waits, all that these sent before has arrived; if nothing of it ended the wait, nothing will, unless what
arrived made a rank answer without its Python. The ranks therefore say so several times over, in phases, and are in a
deadlock when all of them still wait as at the beginning.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwright.data_parallel.collectives import ReplicaCollectives

if TYPE_CHECKING:
    from shardwright.job.runtime import Runtime

#: After this long without progress, ranks begin to compare their waits.
QUIET_SECONDS = 1.0
#: The number of announcements; answers that need no Python may cause one answer less than this.
_PHASES = 4
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


class DeadlockDetector:
    """One rank's part of the proof.

    Attributes:
        proof: What all ranks wait for, once the deadlock is proven.
        round: The number of the attempt; a proof has the same number on all ranks.
        wait_id: The announced wait of this rank, while it lasts.
    """

    def __init__(
        self,
        rank: int,
        others: Sequence[int],
        send: Callable[[dict[str, Any]], None],
        describe: Callable[[], str],
    ) -> None:
        """Create the detector of a rank.

        Args:
            rank: This rank.
            others: The other ranks of the job.
            send: Sends a message to all of them.
            describe: Returns a description of what this rank does.
        """
        self._rank = rank
        self._send = send
        self._describe = describe
        self.round = 0
        self._phase = 0
        self.wait_id: WaitId | None = None
        #: The last announced round and phase, by rank.
        self._received: dict[int, tuple[int, int]] = dict.fromkeys(others, (0, 0))
        self._announcements: dict[int, dict[str, Any]] = {}
        self._complete_since: float | None = None
        self.proof: str | None = None

    def reset(self, ended: int) -> None:
        """Start over after round ``ended``, whose proof was completed here or on another rank."""
        self.round = max(self.round, ended)
        self.proof = self.wait_id = self._complete_since = None
        self._phase = 0
        self._announcements.clear()

    def receive(self, rank: int, message: dict[str, Any]) -> None:
        """Handle the announcement of another rank."""
        self._received[rank] = message["round"], message["phase"]
        self._announcements[rank] = message

    def update(self, state: WaitState, now: float) -> None:
        """Advance the proof; called periodically.

        Args:
            state: What this rank waits for.
            now: The monotonic time.
        """
        wait_id = state.wait_id
        if self.proof is not None:
            return
        newest = max((number for number, _ in self._received.values()), default=0)
        if wait_id is None or wait_id != self.wait_id:
            self.wait_id = None  # this rank went on, or goes on
        if self.wait_id is None:
            if wait_id is not None and (newest > self.round or state.seconds >= QUIET_SECONDS):
                self.wait_id, self.round = wait_id, max(newest, self.round + 1)
                self._announce(1, state)
            return
        if newest > self.round:
            self.round = newest
            self._announce(1, state)
        if any(heard < (self.round, self._phase) for heard in self._received.values()):
            return
        self._complete_since = now if self._complete_since is None else self._complete_since
        if state.last_checked <= self._complete_since:
            return
        if self._phase < _PHASES:
            self._announce(self._phase + 1, state)
        elif all(self._never_completes(said["collective"]) for said in self._announcements.values()):
            self.proof = "\n".join(self._announcements[rank]["text"] for rank in sorted(self._announcements))

    def _announce(self, phase: int, state: WaitState) -> None:
        self._phase = phase
        self._complete_since = None
        self._announcements[self._rank] = {
            "kind": "waits",
            "round": self.round,
            "phase": phase,
            "text": self._describe(),
            "collective": state.collective,
            "begun": list(state.begun),
        }
        self._send(self._announcements[self._rank])

    def _never_completes(self, collective: Collective | None) -> bool:
        """Whether a participant of a collective has not begun it."""
        if collective is None:
            return True
        ranks, number = collective
        return any(
            number > begun for rank in ranks for group, begun in self._announcements[rank]["begun"] if group == ranks
        )


def wait_state_of(runtime: Runtime) -> WaitState:
    """Return the wait of this rank that only other ranks can end.

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
