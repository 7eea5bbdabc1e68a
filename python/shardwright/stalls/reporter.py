"""Stall reports: after a long wait, one message shows what every rank does and where its code is."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any, NamedTuple

from shardwright import _core
from shardwright.errors import PeerLostError, ShardwrightError, StallError
from shardwright.execution.worker import WorkerPool
from shardwright.job.exchange import Gathers
from shardwright.job.objects import send_on
from shardwright.job.queued import QueuedCollectives
from shardwright.job.runtime import Runtime
from shardwright.stalls.lone_calls import LoneCalls
from shardwright.stalls.picture import describe, picture, script_place, split_ranks
from shardwright.stalls.wait_state import wait_state_of
from shardwright.values import decode

_CHANNEL = "stall report"
#: How a rank says that it is in ``smp.recv_from``.
_WAITS_FOR_OBJECT = "for an object from rank"
_SOME_ONLY = (
    " (is a function that all ranks must call, such as state_dict, save, barrier or a step function, called by some "
    "ranks only?)"
)
#: How often the thread polls for messages of other ranks.
_POLL_SECONDS = 0.25
#: How long ranks have to answer.
_ANSWER_SECONDS = 3.0
#: Rank r takes over from rank 0 if no report has begun after this long times r.
_SUBSTITUTE_SECONDS = 5.0


class _EndlessWait(NamedTuple):
    """A wait of this rank's script that cannot end: its number, what all ranks do, and when this rank learned of it."""

    wait: int
    text: str
    since: float


class StallReporter:
    """Assembles the report on rank 0, and describes every other rank for it.

    It runs on a thread of its own, so that a rank can answer while its other threads wait or compute.
    """

    def __init__(self, runtime: Runtime) -> None:
        """For the calling thread, which runs the script."""
        self._runtime = runtime
        self._script = threading.get_ident()
        self._others = [rank for rank in range(runtime.place.launch.world_size) if rank != runtime.place.rank]
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardwright-stall-reporter", daemon=True)
        self._requested = threading.Event()
        #: When a report was requested that no rank has begun yet.
        self._requested_at: float | None = None
        self._number = 0
        self._answers: dict[int, str] = {}
        #: When the report in progress must be finished.
        self._deadline: float | None = None
        self._last = -float("inf")
        self._detector = _core.DeadlockDetector(runtime.place.rank, self._others)
        self._deadlock: _EndlessWait | None = None
        self._found_deadlock = threading.Event()
        #: When to fail which step, and why.
        self._failing: tuple[float, int, str] | None = None
        self._lone_calls = LoneCalls(runtime, self._script, self, self._end_lone_call)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join(2 * _POLL_SECONDS)
        if self._deadline is not None:  # the wait ended this rank's script
            self._finish_report()

    def request_report(self) -> None:
        """Request a report, because this rank has waited for long."""
        self._requested.set()

    def _run(self) -> None:
        while not self._stopped.wait(_POLL_SECONDS):
            try:
                self._runtime[WorkerPool].check()
                self._runtime[QueuedCollectives].end_lost()
                self._poll()
            except ShardwrightError:
                return  # this rank has left the job
            except Exception:  # a failure of the reporter must not fail a step
                self._runtime.logger.warning(
                    "rank %d: the stall reporter failed", self._runtime.place.rank, exc_info=True
                )

    def _poll(self) -> None:
        if self._requested.is_set():
            self._requested.clear()
            self._request()
        for rank in self._others:
            # A rank that is gone sends nothing more, but others may have said why.
            with contextlib.suppress(PeerLostError):
                while (received := self._runtime.node.recv_object(rank, _CHANNEL, 0.0)) is not None:
                    self._handle(rank, decode(*received))
        now = time.monotonic()
        if self._requested_at is not None and now > self._requested_at + _SUBSTITUTE_SECONDS * self._runtime.place.rank:
            self._begin_report()
        if self._deadline is not None and (now > self._deadline or len(self._answers) == len(self._others)):
            self._finish_report()
        if self._failing is not None and now > self._failing[0]:
            _, step, text = self._failing
            self._failing = None
            if self._runtime.step.running and self._runtime.step.number == step:
                self._fail_step(step, text)
        self._lone_calls.poll(now)
        announcement = self._detector.update(*wait_state_of(self._runtime), now, self.describe)
        if announcement is not None:
            self.send_to_all({"kind": "waits", "announcement": announcement})
        if self._detector.proof is not None and not self._lone_calls.is_ending(now):
            number, proof = self._detector.round, self._detector.proof
            self.send_to_all({"kind": "deadlock", "round": number, "text": proof})
            self._end_deadlock(number, proof)

    def _end_deadlock(self, number: int, proof: str) -> None:
        """Make the waiting script raise, unless the wait has ended since."""
        runtime = self._runtime
        if number <= runtime[Gathers].epoch:  # proven here and elsewhere
            return
        # Another rank may have failed the step already, and this one may be in the next.
        step, wait_id = runtime.step.number, wait_state_of(runtime).wait_id
        if (self._detector.round, self._detector.wait_id) != (number, wait_id):
            wait_id = None
        self._detector.reset(number)
        runtime[Gathers].reset(number)
        of_objects = all(_WAITS_FOR_OBJECT in text for text in split_ranks(proof))  # of recv_from
        asked = "" if of_objects else _SOME_ONLY
        text = f"deadlock: all ranks wait for each other{asked}; state of all ranks:\n{picture(split_ranks(proof))}"
        if wait_id is not None and wait_id[0] == "wait":
            self._end_wait(wait_id[1], text)
        elif wait_id is not None and runtime.step.running:
            self._fail_step(step, text)

    def _end_wait(self, number: int, text: str, later: float = 0.0) -> None:
        """Make the script raise in the wait with this number, ``later`` seconds after it would at once."""
        self._deadlock = _EndlessWait(number, text, time.monotonic() + later)
        self._found_deadlock.set()

    def _fail_step(self, step: int, text: str) -> None:
        runtime = self._runtime
        runtime[WorkerPool].error = runtime[WorkerPool].error or StallError(text)
        runtime.server.fail(
            module=None,
            microbatch=None,
            phase=None,
            kind=StallError.__qualname__,
            message=text,
            traceback="",
            step=step,
        )

    def _end_lone_call(self, step: int, text: str) -> None:
        """End on all ranks what waits for this one, whose newest step has that number and whose call cannot end."""
        number = max(self._detector.round, self._runtime[Gathers].epoch) + 1
        self.send_to_all({"kind": "lone call", "round": number, "step": step, "text": text})
        self._end_calls(number, step, text)

    def _end_calls(self, number: int, step: int, text: str) -> None:
        """Make the script raise in a call of a group, or in a step later than that which cannot end."""
        runtime = self._runtime
        if number <= runtime[Gathers].epoch:
            return
        waits, own = list(runtime.waits), runtime.step.number
        self._detector.reset(number)
        runtime[Gathers].reset(number)
        in_step = runtime.step.running and own > step
        # First all ranks count anew: a step that fails on one fails on all, which then call what comes next.
        if waits and (in_step or waits[-1].call is not None):
            # Steps fail before a call raises, after which its rank would enter them.
            self._end_wait(waits[-1].number, text, later=(2 if in_step else 4) * _POLL_SECONDS)
        elif in_step:
            self._failing = (time.monotonic() + 2 * _POLL_SECONDS, own, text)

    def check(self, wait: int, failed: BaseException | None = None) -> None:
        """Raise if all ranks wait for one another, this one in the wait with this number.

        An error that ended the wait may be due to the deadlock. Without one, other ranks are first given time to learn
        of it.
        """
        if failed is not None and self._detector.wait_id == ("wait", wait):
            # What a rank said before it left, or failed in a step, may not have been read yet.
            self._found_deadlock.clear()
            self._found_deadlock.wait(2 * _POLL_SECONDS)
        found = self._deadlock
        if found is None or found.wait != wait:
            return
        if failed is not None or time.monotonic() > found.since + 2 * _POLL_SECONDS:
            error = StallError(found.text)
            for each in self._runtime.waits:
                if each.number == wait and each.call is not None and each.call.advice not in found.text:
                    error.add_note(each.call.advice)
            raise error from None

    def _request(self) -> None:
        if self._runtime.place.rank != 0 and self.send(0, {"kind": "request"}):
            self._requested_at = time.monotonic()
        else:
            self._begin_report()

    def _handle(self, rank: int, message: dict[str, Any]) -> None:
        if message["kind"] == "waits":
            self._detector.receive(rank, message["announcement"])
        elif message["kind"] == "deadlock":
            self._end_deadlock(message["round"], message["text"])
        elif message["kind"] == "lone call":
            self._end_calls(message["round"], message["step"], message["text"])
        elif message["kind"] == "where":
            self._lone_calls.asked(rank, message)
        elif message["kind"] == "there":
            self._lone_calls.answered(rank, message)
        elif message["kind"] == "request":
            self._begin_report()
        elif message["kind"] == "describe":
            self._requested_at = None
            self.send(rank, {"kind": "description", "number": message["number"], "text": self.describe()})
        elif message["number"] == self._number and self._deadline is not None:
            self._answers[rank] = message["text"]

    def _begin_report(self) -> None:
        self._requested_at = None
        now = time.monotonic()
        # Ranks that wait for one another request a report at about the same time; one is enough.
        if self._deadline is not None or now < self._last + self._runtime.place.cfg.stall_report_seconds / 2:
            return
        self._number += 1
        self._answers.clear()
        self._deadline = now + _ANSWER_SECONDS
        for rank in self._others:
            if not self.send(rank, {"kind": "describe", "number": self._number}):
                self._answers[rank] = f"rank {rank} is gone"

    def _finish_report(self) -> None:
        self._deadline = None
        self._last = time.monotonic()
        texts = {rank: self._answers.get(rank) or self._missing_answer(rank) for rank in self._others}
        texts[self._runtime.place.rank] = self.describe()
        shown = picture(texts[rank] for rank in sorted(texts))
        self._runtime.logger.warning("a rank has been waiting for a long time; state of all ranks:\n%s", shown)

    def _missing_answer(self, rank: int) -> str:
        heard = self._runtime.server.describe(rank)
        return (
            f"rank {rank} did not answer within {_ANSWER_SECONDS:.0f} s: it runs C code that holds the interpreter's "
            f"lock, or is frozen {heard}".rstrip()
        )

    def send_to_all(self, message: dict[str, Any]) -> None:
        """Send a message to the reporters of all other ranks."""
        for rank in self._others:
            self.send(rank, message)

    def send(self, rank: int, message: dict[str, Any]) -> bool:
        """Send a message to the reporter of another rank; whether it is there."""
        try:
            send_on(self._runtime, rank, _CHANNEL, message)
        except ShardwrightError:
            return False
        return True

    def describe(self) -> str:
        """Describe what this rank does, and where its script and its tasks are."""
        return describe(self._runtime, self._script)

    def script_line(self) -> str:
        """Where the script is."""
        return script_place(self._script)
