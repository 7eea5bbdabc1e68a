"""Objects and collectives between ranks, with checks for failures of steps and ranks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from shardwright import _core
from shardwright.errors import PeerLostError
from shardwright.job.runtime import Runtime
from shardwright.job.waiting import GroupCall, Wait


class Gathers:
    """The number of gathers of a group, by channel; the same on all its ranks.

    Attributes:
        epoch: How often they waited for one another in vain, and then began to count anew.
    """

    def __init__(self) -> None:
        """Start counting."""
        self._begun: Counter[str] = Counter()
        self.epoch = 0

    def next(self, channel: str) -> tuple[int, int]:
        """Begin a gather on a channel, and return its number."""
        self._begun[channel] += 1
        return self.newest(channel)

    def newest(self, channel: str) -> tuple[int, int]:
        """Return the number of the gather that was begun last on a channel."""
        return self.epoch, self._begun[channel]

    def begun(self) -> dict[str, tuple[int, int]]:
        """Return the number of the gather that was begun last on each channel."""
        return {channel: self.newest(channel) for channel in list(self._begun)}

    def reset(self, epoch: int) -> None:
        """Restart counting, because some ranks had begun gathers that others will not call."""
        self._begun.clear()
        self.epoch = epoch


def send_object(runtime: Runtime, rank: int, channel: str, spec: _core.Spec, parts: _core.TensorParts) -> None:
    """Send an encoded object to a rank, without waiting; see :func:`receive_object`."""
    try:
        runtime.node.send_object(rank, channel, spec, parts)
    except PeerLostError:
        runtime.check_abort([])  # what made a rank leave it has told before its goodbye
        raise


def receive_object(
    runtime: Runtime,
    rank: int,
    channel: str,
    deadline: float | None = None,
    what: str | None = None,
    call: GroupCall | None = None,
    beside: Callable[[], None] | None = None,
) -> Any:
    """Receive an object from another rank, while checking for failures of the step.

    ``what`` describes it in reports, and ``call`` is the call of a group that it belongs to, if it does. Without a
    ``deadline`` (of the monotonic clock), it waits as long as the sender lives. ``beside`` is called again and again in
    a long wait, and may raise.

    Raises:
        TimeoutError: It did not come before the deadline.
    """
    # Most come soon: so short a wait is nobody's business.
    if (received := arrived(runtime, rank, channel, 0.1 if deadline is None else 0.0)) is not None:
        return received
    what = f"an object from rank {rank} on channel {channel!r}" if what is None else what
    with Wait(runtime, what, [rank], ends_by_message=deadline is None, call=call) as wait:
        while True:
            if (received := arrived(runtime, rank, channel, 0.1)) is not None:
                return received
            if beside is not None:
                beside()
            if deadline is None:
                wait.check()
            elif time.monotonic() > deadline:
                raise TimeoutError(f"rank {runtime.place.rank} timed out waiting for {what}")


def arrived(runtime: Runtime, rank: int, channel: str, seconds: float = 0.0) -> Any:
    """Return an object that a rank has sent on a channel, if one is here after so many seconds; else None.

    Raises:
        PeerLostError: None is here, and the rank is gone.
    """
    try:
        return runtime.node.recv_object(rank, channel, seconds)
    except PeerLostError:
        runtime.check_abort([])  # as in send_object
        raise


def wait_collective(runtime: Runtime, work: Any, ranks: list[int], number: int | None = None) -> None:
    """Have the host wait for a collective of ``torch.distributed``, checking for failures of the ranks that take part.

    ``number`` is its number among the group's collectives, where they are counted.
    """
    if not work.is_completed():
        with Wait(runtime, f"a collective of ranks {ranks}", ranks, collective=number) as wait:
            wait.until_completed(work, runtime.place.device)
    try:
        work.wait()
    except RuntimeError:
        raise_loss(runtime, ranks)
        raise


def raise_loss(runtime: Runtime, ranks: list[int]) -> None:
    """Raise an error that names the lost rank, which a failed collective does not."""
    deadline = time.monotonic() + runtime.place.cfg.liveness_timeout_seconds
    while time.monotonic() < deadline:
        runtime.check_abort(ranks)
        time.sleep(0.01)
