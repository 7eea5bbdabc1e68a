"""Calls that all ranks of a group have to make, made by some of them only: found without a proof that all wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from shardwright.job.exchange import Gathers
from shardwright.job.runtime import Runtime
from shardwright.job.waiting import GroupCall, Wait
from shardwright.stalls.picture import picture

#: After how long a wait this rank asks the others where they are.
_ASK_SECONDS = 0.5
#: After how long a wait it asks again, to name the ranks that did not come and may be slow.
WARN_SECONDS = 10.0
#: How long the others have to answer.
_ANSWER_SECONDS = 1.0


class Ranks(Protocol):
    """The stall reporter, as far as it is needed here."""

    def send(self, rank: int, message: dict[str, Any]) -> bool:
        """Send a message to the reporter of another rank; whether it is there."""

    def describe(self) -> str:
        """What this rank does, and where its code is."""

    def script_line(self) -> str:
        """Where the script is."""


class _Answer(NamedTuple):
    """Where another rank is.

    Attributes:
        came: Whether it has made the call.
        never: Why it cannot make it any more; empty if it may.
        line: Where its script is.
        text: What it does, if that was asked for.
    """

    came: bool
    never: str
    line: str
    text: str


class _Asking:
    """What this rank learns in one wait."""

    def __init__(self, wait: Wait, call: GroupCall) -> None:
        self.wait = wait.number
        self.call = call
        self.answers: dict[int, _Answer] = {}
        #: Why ranks cannot come, once one cannot.
        self.never: dict[int, str] = {}
        #: Until when answers are waited for, to an error or a warning.
        self.deadline: float | None = None
        self.warned = False


class LoneCalls:
    """One rank's view of the call in which its script waits.

    A rank that waits asks the others where they are. What each answers was true when it answered, and messages arrive
    in order. Two answers say that a rank cannot come: it is in a step that this rank has not entered, which cannot end
    without this one; or it waits in another call for this rank, which has not made that. Both are so for ever, since
    the script's thread of either waits for the other. Whoever does anything else may only be slow, and answers again
    when it cannot come any more.
    """

    def __init__(self, runtime: Runtime, script: int, ranks: Ranks, end: Callable[[int, str], None]) -> None:
        """Watch the waits of a thread.

        Args:
            runtime: The rank.
            script: The thread that runs the script.
            ranks: What sends and describes.
            end: Is called with the number of this rank's newest step and the text of the error, when a call cannot end.
        """
        self._runtime = runtime
        self._script = script
        self._ranks = ranks
        self._end = end
        self._asking: _Asking | None = None
        #: The questions of others to which the answer may change, by rank.
        self._open: dict[int, dict[str, Any]] = {}
        #: Until when this rank, or one that it has answered, may end a call that cannot end.
        self._ends_until = -float("inf")

    def is_ending(self, now: float) -> bool:
        """Return whether a call that cannot end is being ended, with an error that says more than a deadlock's."""
        return now < self._ends_until

    def poll(self, now: float) -> None:
        """Ask, answer and end, as time goes by."""
        for rank, question in list(self._open.items()):
            if self._came(question):
                del self._open[rank]
            elif self._never(rank, question):
                self.asked(rank, question)
        found = self._waits()
        if found is None or found[0].seconds < _ASK_SECONDS:
            return
        wait, call = found
        asking = self._asking
        if asking is None or asking.wait != wait.number:
            self._asking = _Asking(wait, call)
            self._ask(call, call.ranks, describe=False)
            return
        world = self._runtime.place.launch.world_size
        if asking.never:
            answered = sum(bool(answer.text) for answer in asking.answers.values())
            if asking.deadline is None:
                asking.deadline = now + _ANSWER_SECONDS
                self._ask(call, range(world), describe=True)
            elif answered == world - 1 or now > asking.deadline:
                self._end_call(asking)
        elif wait.seconds >= WARN_SECONDS and not asking.warned:
            if asking.deadline is None:
                asking.deadline = now + _ANSWER_SECONDS
                asking.answers.clear()
                self._ask(call, call.ranks, describe=False)
            elif len(asking.answers) == len(call.ranks) - 1 or now > asking.deadline:
                asking.warned, asking.deadline = True, None
                self._warn(asking, wait.seconds)

    def _ask(self, call: GroupCall, ranks: Iterable[int], *, describe: bool) -> None:
        assert self._asking is not None, "an answer has to be expected"
        step = self._runtime.step
        question = {
            "kind": "where",
            "wait": self._asking.wait,
            "call": (call.channel, call.number),
            "step": None if step.running else step.number,
            "begun": self._runtime[Gathers].begun(),
            "describe": describe,
        }
        for rank in ranks:
            if rank != self._runtime.place.rank:
                self._ranks.send(rank, question)

    def _waits(self) -> tuple[Wait, GroupCall] | None:
        """The wait of the script, and the call that it is in."""
        waits = list(self._runtime.waits)
        wait = waits[-1] if waits else None
        return None if wait is None or wait.call is None or wait.thread != self._script else (wait, wait.call)

    def asked(self, rank: int, question: dict[str, Any]) -> None:
        """Answer another rank's question where this one is."""
        came = self._came(question)
        never = "" if came else self._never(rank, question)
        if came or never:
            self._open.pop(rank, None)
        else:
            self._open[rank] = question
        if never:
            self._ends_until = time.monotonic() + 2 * _ANSWER_SECONDS
        text = self._ranks.describe() if question["describe"] else ""
        answer = _Answer(came, never, self._ranks.script_line(), text)
        self._ranks.send(rank, {"kind": "there", "wait": question["wait"], "answer": tuple(answer)})

    def _came(self, question: dict[str, Any]) -> bool:
        channel, number = question["call"]
        return self._runtime[Gathers].newest(channel) >= tuple(number)

    def _never(self, rank: int, question: dict[str, Any]) -> str:
        """Why this rank cannot come to the call of another one; empty if it may."""
        step = self._runtime.step
        if question["step"] is not None and step.running and step.number > question["step"]:
            return f"is in step {step.number}, which cannot end without rank {rank}"
        found = self._waits()
        if found is None:
            return ""
        call = found[1]
        if rank in call.ranks and tuple(question["begun"].get(call.channel, (call.number[0], 0))) < call.number:
            return f"is in {call.operation}, which cannot end without rank {rank}"
        return ""

    def answered(self, rank: int, message: dict[str, Any]) -> None:
        """Take note of where another rank is."""
        asking, found = self._asking, self._waits()
        if asking is None or found is None or not found[0].number == asking.wait == message["wait"]:
            return
        answer = asking.answers[rank] = _Answer(*message["answer"])
        if answer.never and rank in asking.call.ranks:
            self._ends_until = time.monotonic() + 2 * _ANSWER_SECONDS
            if not asking.never:
                asking.deadline = None
            asking.never[rank] = answer.never

    def _end_call(self, asking: _Asking) -> None:
        own = self._runtime.place.rank
        told = " and ".join(f"rank {rank} {why}" for rank, why in sorted(asking.never.items()))
        texts = {own: self._ranks.describe(), **{rank: one.text for rank, one in asking.answers.items() if one.text}}
        shown = picture(texts[rank] for rank in sorted(texts))
        call = asking.call
        self._asking = None
        self._end(
            self._runtime.step.number,
            f"rank {own} is in {call.operation}, and {told}: {call.advice}; state of all ranks:\n{shown}",
        )

    def _warn(self, asking: _Asking, seconds: float) -> None:
        """Name the ranks that have not come, on the first rank that has."""
        own, call = self._runtime.place.rank, asking.call
        if any(one.came for rank, one in asking.answers.items() if rank < own):
            return
        missing = []
        for rank in call.ranks:
            answer = asking.answers.get(rank)
            if rank != own and (answer is None or not answer.came):
                missing.append(f"rank {rank} (" + ("does not answer" if answer is None else answer.line) + ")")
        if missing:
            self._runtime.logger.warning(
                "rank %d has waited %.0f s in %s for %s. If they are slow, it goes on when they come; if not, %s",
                own,
                seconds,
                call.operation,
                ", ".join(missing),
                call.advice,
            )
