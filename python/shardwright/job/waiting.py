"""Waits outside the execution server: for objects of other ranks, and for collectives."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch

from shardwright.errors import RemoteError, StallError
from shardwright.job.runtime import Runtime
from shardwright.job.threads import task_of_thread

#: Shorter waits are not reported.
_UNNOTICED_SECONDS = 0.5
#: How long a collective is waited for before the next look whether the wait still makes sense.
_CHECK_INTERVAL = timedelta(milliseconds=20)
_MIN_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 1e-5, 1e-3


_numbers = itertools.count(1)


class GroupCall(NamedTuple):
    """A call that all ranks of a group have to make.

    Attributes:
        operation: The function, as scripts call it.
        channel: On which its objects travel.
        number: Its number on that channel.
        ranks: The group.
    """

    operation: str
    channel: str
    number: tuple[int, int]
    ranks: list[int]

    @property
    def advice(self) -> str:
        """What to write."""
        return (
            f"ranks {', '.join(map(str, self.ranks))} have to call {self.operation}: write it outside of "
            "`if smp.rank() == 0:` and the like"
        )


class StallObserver(Protocol):
    """Watches long waits, and detects deadlocks."""

    def request_report(self) -> None:
        """Request a stall report: a wait has lasted ``stall_report_seconds``, or twice that, and so on."""

    def check(self, wait: int, failed: BaseException | None = None) -> None:
        """Raise if the wait with this number can never end; ``failed`` is the error that ended it, if one did."""

    def stop(self) -> None:
        """Stop watching."""


class Wait:
    """A wait that is reported when it is long, and ends when the step fails or the whole job stands still.

    A rank that waits does not compute, so others who wait for it see the stall as well. On a worker, which has its
    rank's turn, a wait counts as computing.
    """

    def __init__(
        self,
        runtime: Runtime,
        what: str,
        needed: list[int],
        *,
        ends_by_message: bool = False,
        collective: int | None = None,
        call: GroupCall | None = None,
    ) -> None:
        """Begin to wait for what ``what`` describes, which needs the ranks ``needed``.

        ``ends_by_message`` tells that only an object sent by another rank's script can end the wait. A ``collective``
        has an index among those of the needed ranks, where they are counted. ``call`` is the call of a group in which
        this rank waits for the others.
        """
        self.number = next(_numbers)
        self.call = call
        self.thread = threading.get_ident()
        self.ends_by_message = ends_by_message
        self.collective = None if collective is None else (needed, collective)
        #: When the last check that found nothing began.
        self.last_checked = -float("inf")
        self._check_began = self.last_checked
        self._runtime = runtime
        self._what = what
        self._needed = needed
        self._began = time.monotonic()
        self._next_report: float = runtime.place.cfg.stall_report_seconds
        self._on_main = task_of_thread() is None
        self._noticed = False

    def __enter__(self) -> Wait:
        """For a ``with`` block that holds the wait."""
        self._runtime.waits.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The wait is over."""
        try:
            if isinstance(error, RemoteError | StallError) and self._runtime.observer is not None:
                self._runtime.observer.check(self.number, error)
        finally:
            self._runtime.waits.remove(self)
            if self._noticed:
                self._runtime.server.wait_outside(False)

    @property
    def seconds(self) -> float:
        """The seconds waited so far."""
        return time.monotonic() - self._began

    def describe(self) -> str:
        """Describe the wait in one line."""
        return f"rank {self._runtime.place.rank} has waited {self.seconds:.1f} s for {self._what}"

    def until_completed(self, work: Any, device: torch.device) -> None:
        """Wait until a collective on tensors of a device has ended, well or not; raises as :meth:`check`."""
        pause = _MIN_PAUSE_SECONDS
        while not work.is_completed():
            self.check()
            if device.type == "cpu":  # Gloo wakes up whoever waits, and to it a timeout means nothing
                with contextlib.suppress(RuntimeError):
                    work.wait(_CHECK_INTERVAL)
            else:
                time.sleep(pause)
                pause = min(pause * 1.5, _MAX_PAUSE_SECONDS)

    def check(self) -> None:
        """Check whether the wait can still end; called periodically.

        Raises:
            RemoteError: The step has failed elsewhere.
            PeerLostError: A rank that is needed is gone.
            StallError: Nothing in the job has made progress for ``stall_timeout_seconds``, or all ranks wait for one
                another.
        """
        runtime = self._runtime
        runtime.check_abort(self._needed)
        if runtime.observer is not None:
            runtime.observer.check(self.number)
        self.last_checked, self._check_began = self._check_began, time.monotonic()
        waited = self.seconds
        if waited < _UNNOTICED_SECONDS or not self._on_main:
            return
        self._noticed = True
        quiet = runtime.server.wait_outside(True)
        if waited >= self._next_report:
            self._next_report *= 2
            if runtime.observer is not None:
                runtime.observer.request_report()
        if quiet >= runtime.place.cfg.stall_timeout_seconds:
            raise StallError(
                f"nothing in the job has made progress for {quiet:.1f} s; "
                f"rank {runtime.place.rank} waits for {self._what}"
            )
