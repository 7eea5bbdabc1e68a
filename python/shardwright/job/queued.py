"""Collectives for which streams of a device wait, and the host watches them a bounded number behind."""

from __future__ import annotations

import os
import time
from collections import deque
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwright.errors import PeerLostError, RemoteError, ShardwrightError
from shardwright.job.exchange import raise_loss, wait_collective
from shardwright.job.runtime import Runtime

#: How many collectives the host may be ahead of a device. So many of the shortest last longer than the host's longest
#: pause between two looks, so that the device never runs dry meanwhile.
MAX_BEHIND = 16
#: How long the script has to see by itself that a collective cannot end.
_UNSEEN_SECONDS = 2.0
#: Nothing is ever sent on it.
_CHANNEL = "collectives"
#: What torch takes for yes in the variables by which NCCL's waits are made to block the host.
_YES = ("y", "yes", "1", "t", "true")


class _Queued(NamedTuple):
    work: Any
    group: dist.ProcessGroup
    device: torch.device
    ranks: list[int]
    number: int | None
    renewed: bool


def orders_streams(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether ``wait`` of a group's collective makes the calling thread's stream wait, and not the host.

    So do NCCL's. With Gloo, the host waits for tensors of a GPU as for its own, and a stream for the copy back.
    """
    if device.type == "cpu" or group._get_backend(device).name() != "nccl":
        return False
    variables = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
    return not any(os.environ.get(variable, "").lower() in _YES for variable in variables)


def end_collectives(group: dist.ProcessGroup, device: torch.device) -> None:
    """End the collectives of a group whose ranks will not all take part, so that streams go on; it is of no use then.

    Without this a stream that waits for one would never run again, nor would who waits for the stream.
    """
    if orders_streams(group, device):
        group._get_backend(device).abort()


class QueuedCollectives:
    """The collectives of this rank, in the order in which streams wait for them.

    The host goes on at once, and is at most :data:`MAX_BEHIND` collectives ahead of the device: so it notices in time
    that one will never end, because a rank is gone or the step has failed.
    """

    def __init__(self, runtime: Runtime) -> None:
        """Of a rank."""
        self._runtime = runtime
        self._behind: deque[_Queued] = deque()
        self._ended: set[dist.ProcessGroup] = set()
        self._lost_since: float | None = None

    def wait(
        self,
        work: Any,
        group: dist.ProcessGroup,
        device: torch.device,
        ranks: list[int],
        number: int | None = None,
        *,
        renewed: bool = False,
    ) -> None:
        """Have what this thread gives its stream from now on run after a collective on tensors of a device.

        The host may only read the result after :meth:`finish`, or :func:`~shardwright.job.exchange.wait_collective`.
        Where no stream can wait, the host does.

        Args:
            work: The collective.
            group: Its group.
            device: Where its tensors are.
            ranks: Who takes part.
            number: Its number among the group's collectives, where they are counted.
            renewed: Whether the group is made anew after a failed step, so that its collectives can be ended.

        Raises:
            RemoteError: The step has failed elsewhere, or a rank that takes part in this collective or in an earlier
                one is gone.
        """
        if not orders_streams(group, device):
            wait_collective(self._runtime, work, ranks, number)
            return
        self._check_ended(group, ranks)
        try:
            work.wait()
        except RuntimeError:
            raise_loss(self._runtime, ranks)
            raise
        if _is_capturing(device):
            return  # it is a part of a graph, and runs when that is launched
        self._behind.append(_Queued(work, group, device, ranks, number, renewed))
        self._watch(MAX_BEHIND)

    def finish(self) -> None:
        """Wait until all are over; raises as :meth:`wait`."""
        self._watch(0)

    def abandon(self) -> None:
        """End the collectives of a failed step whose group is made anew, so that its modules and its undoing go on.

        The others end when the ranks settle what each of them has begun, or with :meth:`end_lost`.
        """
        queued = list(self._behind)
        self._behind.clear()
        self._behind.extend(one for one in queued if not one.renewed)
        self._end([one for one in queued if one.renewed])

    def leave(self) -> None:
        """End what has not ended: the job is over, and the process could not end while a stream waits."""
        self._end(list(self._behind))
        self._behind.clear()

    def end_lost(self) -> None:
        """End collectives that cannot end by themselves, if the script does not see it: it waits for their stream.

        Called from time to time, by another thread than the script's.
        """
        lost = [one for one in list(self._behind) if not one.work.is_completed() and self._cannot_end(one)]
        if not lost:
            self._lost_since = None
            return
        now = time.monotonic()
        self._lost_since = self._lost_since or now
        if now < self._lost_since + _UNSEEN_SECONDS:
            return
        self._end(lost)
        self._runtime.logger.warning(
            "rank %d has ended its collectives on %s, in which other ranks do not take part",
            self._runtime.place.rank,
            self._runtime.place.device,
        )

    def _end(self, lost: list[_Queued]) -> None:
        unfinished = [one for one in lost if one.group not in self._ended and not one.work.is_completed()]
        for group, device in dict.fromkeys((one.group, one.device) for one in unfinished):
            self._ended.add(group)
            end_collectives(group, device)

    def _cannot_end(self, queued: _Queued) -> bool:
        own = self._runtime.place.rank
        if any(self._is_gone(rank) for rank in queued.ranks if rank != own):
            return True
        if queued.renewed:
            try:
                self._runtime.check_abort([])
            except RemoteError:
                return True
        return False

    def _is_gone(self, rank: int) -> bool:
        try:
            self._runtime.node.recv_object(rank, _CHANNEL, 0.0)
        except PeerLostError:
            return True
        return False

    def _check_ended(self, group: dist.ProcessGroup, ranks: list[int]) -> None:
        if group in self._ended:
            raise_loss(self._runtime, ranks)
            raise ShardwrightError(
                f"rank {self._runtime.place.rank}: the collectives of ranks {ranks} were ended, because one of these "
                "was gone; start the job again"
            )

    def _watch(self, most: int) -> None:
        while len(self._behind) > most:
            try:
                oldest = self._behind[0]
            except IndexError:  # another thread, or the end of the step, was faster
                return
            wait_collective(self._runtime, oldest.work, oldest.ranks, oldest.number)
            self._check_ended(oldest.group, oldest.ranks)
            # Only now, so that it can be ended meanwhile.
            if self._behind and self._behind[0] is oldest:
                self._behind.popleft()


def _is_capturing(device: torch.device) -> bool:
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
