"""One picture of the job, when a rank has waited for long: what every rank does, and where its Python stands."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwright import _core
from shardwright.errors import PeerLostError, ShardwrightError, StallError
from shardwright.execution.worker import WorkerPool
from shardwright.failure_text import sendable
from shardwright.job.exchange import Gathers
from shardwright.job.objects import send_on
from shardwright.stalls.standing import standing_of
from shardwright.values import decode

if TYPE_CHECKING:
    from shardwright.job.runtime import Runtime

_CHANNEL = "picture of the job"
#: How often the thread looks for what other ranks want of it.
_LOOK_SECONDS = 0.25
#: How long the ranks may take to say what they do.
_ANSWER_SECONDS = 3.0
#: After how long another rank makes the picture in the place of one that does not; times its number.
_SUBSTITUTE_SECONDS = 5.0
_MOST_CALLS = 12


class _Deadlocked(NamedTuple):
    """A wait of this rank's script that nothing will end.

    Attributes:
        wait: Its number.
        text: What all ranks do.
        since: Since when this rank knows it, in monotonic seconds.
    """

    wait: int
    text: str
    since: float


class Photographer:
    """Makes the picture on rank 0, and says on every rank what that rank does.

    It has a thread of its own, so that a rank shows where it stands while its other threads wait or compute.
    """

    def __init__(self, runtime: Runtime) -> None:
        """For the calling thread, which runs the script."""
        self._runtime = runtime
        self._script = threading.get_ident()
        self._others = [rank for rank in range(runtime.place.launch.world_size) if rank != runtime.place.rank]
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardwright-picture", daemon=True)
        self._wanted = threading.Event()
        #: When another rank was asked for a picture, and has not begun to make one.
        self._asked: float | None = None
        self._number = 0
        self._answers: dict[int, str] = {}
        #: When the picture that is being made has to be finished.
        self._deadline: float | None = None
        self._last = -float("inf")
        self._waits = _core.Deadlock(runtime.place.rank, self._others)
        self._deadlock: _Deadlocked | None = None
        self._found_deadlock = threading.Event()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join(2 * _LOOK_SECONDS)
        if self._deadline is not None:  # the wait ended this rank's script
            self._finish()

    def want(self) -> None:
        """This rank has waited for long: somebody should make a picture."""
        self._wanted.set()

    def _run(self) -> None:
        while not self._stopped.wait(_LOOK_SECONDS):
            try:
                self._runtime[WorkerPool].check()
                self._look()
            except ShardwrightError:
                return  # this rank has left the job
            except Exception:  # it only looks on: what it cannot show or prove ends nobody's step
                self._runtime.logger.warning(
                    "rank %d could not look at the job", self._runtime.place.rank, exc_info=True
                )

    def _look(self) -> None:
        if self._wanted.is_set():
            self._wanted.clear()
            self._ask()
        for rank in self._others:
            # One that is gone says nothing more, but others may have said why.
            with contextlib.suppress(PeerLostError):
                while (received := self._runtime.node.recv_object(rank, _CHANNEL, 0.0)) is not None:
                    self._hear(rank, decode(*received))
        now = time.monotonic()
        if self._asked is not None and now > self._asked + _SUBSTITUTE_SECONDS * self._runtime.place.rank:
            self._begin()
        if self._deadline is not None and (now > self._deadline or len(self._answers) == len(self._others)):
            self._finish()
        if (said := self._waits.look(*standing_of(self._runtime), now, self.describe)) is not None:
            self._send_to_all({"says": "waits", "said": said})
        if self._waits.proof is not None:
            number, proof = self._waits.round, self._waits.proof
            self._send_to_all({"says": "deadlock", "round": number, "text": proof})
            self._end_deadlock(number, proof)

    def _end_deadlock(self, number: int, proof: str) -> None:
        """Let this rank's script raise where it waits, unless what another one did when it raised has let it go on."""
        runtime = self._runtime
        if number <= runtime[Gathers].epoch:  # proven here and elsewhere
            return
        # Another rank may have failed the step already, and this one may be in the next.
        step, mark = runtime.step.number, standing_of(runtime).mark
        if (self._waits.round, self._waits.mark) != (number, mark):
            mark = None
        self._waits.begin_anew(number)
        runtime[Gathers].begin_anew(number)
        text = (
            "every rank waits for another one, and none can go on (is a function that all ranks have to call, as "
            f"state_dict, save, barrier or a step function, called by some of them only?); what they do:\n{proof}"
        )
        if mark is not None and mark[0] == "wait":
            self._deadlock = _Deadlocked(mark[1], text, time.monotonic())
            self._found_deadlock.set()
        elif mark is not None and runtime.step.running:
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

    def check(self, wait: int, failed: BaseException | None = None) -> None:
        """Look whether all ranks wait for one another, and none can go on.

        Args:
            wait: The number of the script's wait that asks.
            failed: What has ended the wait, for that reason perhaps; otherwise the others get the time to hear of it.

        Raises:
            StallError: They do.
        """
        if failed is not None and self._waits.mark == ("wait", wait):
            # What a rank said before it left, or failed in a step, may not have been read yet.
            self._found_deadlock.clear()
            self._found_deadlock.wait(2 * _LOOK_SECONDS)
        found = self._deadlock
        if found is None or found.wait != wait:
            return
        if failed is not None or time.monotonic() > found.since + 2 * _LOOK_SECONDS:
            raise StallError(found.text) from None

    def _ask(self) -> None:
        if self._runtime.place.rank != 0 and self._send(0, {"says": "wanted"}):
            self._asked = time.monotonic()
        else:
            self._begin()

    def _hear(self, rank: int, message: dict[str, Any]) -> None:
        if message["says"] == "waits":
            self._waits.hear(rank, message["said"])
        elif message["says"] == "deadlock":
            self._end_deadlock(message["round"], message["text"])
        elif message["says"] == "wanted":
            self._begin()
        elif message["says"] == "show":
            self._asked = None
            self._send(rank, {"says": "shown", "number": message["number"], "text": self.describe()})
        elif message["number"] == self._number and self._deadline is not None:
            self._answers[rank] = message["text"]

    def _begin(self) -> None:
        self._asked = None
        now = time.monotonic()
        # Ranks that wait for one another ask at about the same time; that is one picture.
        if self._deadline is not None or now < self._last + self._runtime.place.cfg.stall_report_seconds / 2:
            return
        self._number += 1
        self._answers.clear()
        self._deadline = now + _ANSWER_SECONDS
        for rank in self._others:
            if not self._send(rank, {"says": "show", "number": self._number}):
                self._answers[rank] = f"rank {rank} is gone"

    def _finish(self) -> None:
        self._deadline = None
        self._last = time.monotonic()
        texts = {rank: self._answers.get(rank) or self._silence_of(rank) for rank in self._others}
        texts[self._runtime.place.rank] = self.describe()
        listed = "\n".join(texts[rank] for rank in sorted(texts))
        self._runtime.logger.warning("a rank has waited for long; what every rank of the job does:\n%s", listed)

    def _silence_of(self, rank: int) -> str:
        heard = self._runtime.server.describe(rank)
        return (
            f"rank {rank} did not answer within {_ANSWER_SECONDS:.0f} s: it runs C code that holds the interpreter's "
            f"lock, or is frozen {heard}".rstrip()
        )

    def _send_to_all(self, message: dict[str, Any]) -> None:
        for rank in self._others:
            self._send(rank, message)

    def _send(self, rank: int, message: dict[str, Any]) -> bool:
        try:
            send_on(self._runtime, rank, _CHANNEL, message)
        except ShardwrightError:
            return False
        return True

    def describe(self) -> str:
        """What this rank does, and the Python stacks of its script and of its tasks."""
        runtime = self._runtime
        lines = [runtime.describe()]
        frames = sys._current_frames()
        threads = {self._script: "the script"}
        for thread, task in list(runtime[WorkerPool].running.items()):
            what = "the step function" if task.module is None else f"module {task.module!r}"
            threads[thread] = f"{what}, {task.phase}, microbatch {task.microbatch} (worker {task.worker})"
        for thread, name in threads.items():
            frame = frames.get(thread)
            if frame is not None:
                lines += [f"  stack of {name}:", *_stack(frame)]
        return "\n".join(lines)


def _stack(frame: FrameType) -> list[str]:
    calls = traceback.extract_stack(frame)
    lines = [f"    ({len(calls) - _MOST_CALLS} outer calls)"] if len(calls) > _MOST_CALLS else []
    for call in calls[-_MOST_CALLS:]:
        lines.append(f'    File "{call.filename}", line {call.lineno}, in {call.name}')
        if call.line:
            lines.append(f"      {call.line}")
    return [sendable(line) for line in lines]
