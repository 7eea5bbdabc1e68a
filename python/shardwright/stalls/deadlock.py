"""Ranks that wait for one another are found at once, by a proof that none of them can ever go on.

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

#: After how long without progress ranks begin to compare their waits.
QUIET_SECONDS = 1.0
#: How often the ranks say that they wait: answers without Python may cause as many answers less one.
_PHASES = 4
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


class Deadlock:
    """One rank's part in the proof.

    Attributes:
        proof: What all ranks wait for, once it is proven that they do so for ever.
        round: The number of the suspicion; that of a proof is the same on all ranks.
        mark: The wait of this rank that it has told the others of, as long as it lasts.
    """

    def __init__(
        self,
        rank: int,
        others: Sequence[int],
        send: Callable[[dict[str, Any]], None],
        describe: Callable[[], str],
    ) -> None:
        """Begin without a suspicion.

        Args:
            rank: This rank.
            others: The other ranks of the job.
            send: Sends a message to all of them.
            describe: Says in words what this rank does.
        """
        self._rank = rank
        self._send = send
        self._describe = describe
        self.round = 0
        self._phase = 0
        self.mark: WaitMark | None = None
        #: By rank, the round and phase that it announced last.
        self._heard: dict[int, tuple[int, int]] = dict.fromkeys(others, (0, 0))
        self._said: dict[int, dict[str, Any]] = {}
        self._complete_since: float | None = None
        self.proof: str | None = None

    def begin_anew(self, ended: int) -> None:
        """Forget the suspicion of that number, which has been proven here or on another rank."""
        self.round = max(self.round, ended)
        self.proof = self.mark = self._complete_since = None
        self._phase = 0
        self._said.clear()

    def hear(self, rank: int, message: dict[str, Any]) -> None:
        """Another rank has announced a phase."""
        self._heard[rank] = message["round"], message["phase"]
        self._said[rank] = message

    def look(self, standing: Standing, now: float) -> None:
        """Go on with the proof; called again and again.

        Args:
            standing: What this rank waits for.
            now: The monotonic time.
        """
        mark = standing.mark
        if self.proof is not None:
            return
        newest = max((number for number, _ in self._heard.values()), default=0)
        if mark is None or mark != self.mark:
            self.mark = None  # this rank went on, or goes on
        if self.mark is None:
            if mark is not None and (newest > self.round or standing.seconds >= QUIET_SECONDS):
                self.mark, self.round = mark, max(newest, self.round + 1)
                self._announce(1, standing)
            return
        if newest > self.round:
            self.round = newest
            self._announce(1, standing)
        if any(heard < (self.round, self._phase) for heard in self._heard.values()):
            return
        self._complete_since = now if self._complete_since is None else self._complete_since
        if standing.looked <= self._complete_since:
            return
        if self._phase < _PHASES:
            self._announce(self._phase + 1, standing)
        elif all(self._is_for_ever(said["collective"]) for said in self._said.values()):
            self.proof = "\n".join(self._said[rank]["text"] for rank in sorted(self._said))

    def _announce(self, phase: int, standing: Standing) -> None:
        self._phase = phase
        self._complete_since = None
        self._said[self._rank] = {
            "says": "waits",
            "round": self.round,
            "phase": phase,
            "text": self._describe(),
            "collective": standing.collective,
            "begun": list(standing.begun),
        }
        self._send(self._said[self._rank])

    def _is_for_ever(self, collective: Collective | None) -> bool:
        """Whether somebody who takes part in a collective has not begun it."""
        if collective is None:
            return True
        ranks, number = collective
        return any(number > begun for rank in ranks for group, begun in self._said[rank]["begun"] if group == ranks)


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
