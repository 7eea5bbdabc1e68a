"""Collectives between replicas of the same parameters, which stay matched when steps fail."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwright.devices import device_here
from shardwright.interrupts import DeferSignals
from shardwright.job.exchange import wait_collective
from shardwright.job.objects import receive_on, send_on
from shardwright.job.queued import QueuedCollectives, orders_streams
from shardwright.job.runtime import Runtime

#: How long a failed step waits for other ranks to fail too; the rest is done before the next step.
_SETTLE_TIMEOUT_SECONDS = 2.0


#: How many bytes are on their way at once where large numbers of collectives follow one another, and the size of each.
WINDOW_BYTES, CHUNK_BYTES = 100 << 20, 25 << 20
#: A collective: its kind, its number of elements, the name of their dtype, and the type of their device.
_Issued = tuple[str, int, str, str]


class ReplicaCollectives:
    """A rank's collectives with its replicas.

    Attributes:
        dp: Over DP_GROUP, where it has several ranks.
        rdp: Over RDP_GROUP, where it has several ranks and is not DP_GROUP.
        shards: Over the ranks among which parameters are sharded (``sharded_data_parallel_degree``); None without it.
        groups: Over the ranks that have the same shards, where there are several.
        gathers: Between hosts and within them, for a gather of shards by way of one rank of each host; empty without
            it.
    """

    def __init__(self) -> None:
        """Create it without collectives, which need process groups."""
        self.dp: Collectives | None = None
        self.rdp: Collectives | None = None
        self.shards: Collectives | None = None
        self.groups: Collectives | None = None
        self.gathers: tuple[Collectives, ...] = ()

    @property
    def all(self) -> list[Collectives]:
        """The collectives of all groups."""
        return [one for one in (self.dp, self.rdp, self.shards, self.groups, *self.gathers) if one is not None]


class Collectives:
    """Issues and counts the collectives of a group of this rank.

    All ranks of the group issue the same collectives in the same order. A step that fails leaves them apart: some have
    begun collectives that others never will, and the next step's would meet those instead of their own. So after a
    failed step each rank tells the others what it has issued, and takes part with zeros in what it lacks.
    """

    def __init__(self, runtime: Runtime, group: str = "DP_GROUP", ranks: Sequence[int] | None = None) -> None:
        """Issue collectives over DP_GROUP, or over another of the runtime's process groups.

        The ``ranks`` of a group that is not one of the topology must be given.
        """
        self._runtime = runtime
        self._group = group
        self.ranks: list[int] = list(
            runtime.place.topology.group(group, runtime.place.rank) if ranks is None else ranks
        )
        #: What was issued since the last step that ended well.
        self._issued: list[_Issued] = []
        #: What was issued in a step that has not ended well; None for what was waited for, whose memory may go.
        self.works: list[Any] = []
        #: Where the tensor of each is.
        self._devices: list[torch.device] = []
        #: How many collectives have begun in this job.
        self.begun = 0
        self._hooks: dict[str, Callable[[torch.Tensor], Any]] = {}
        #: What was issued here in failed steps, in order, and is not through.
        self._unsettled: dict[int, list[_Issued]] = {}
        self._received: dict[tuple[int, int], list[_Issued]] = {}

    @property
    def own_place(self) -> int:
        """The index of this rank in the group."""
        return self.ranks.index(self._runtime.place.rank)

    @property
    def own_rank(self) -> int:
        """The global rank of this rank."""
        return self._runtime.place.rank

    def sum(self, tensor: torch.Tensor) -> Any:
        """Sum a tensor over the group in place, and return the work."""
        return self._issue("sum", tensor)

    def reduce(self, tensor: torch.Tensor, destination: int) -> Any:
        """Sum a tensor over the group, in place on a global rank, and return the work. Others get any values."""
        return self._issue(f"reduce to {destination}", tensor)

    def gather(self, whole: torch.Tensor) -> Any:
        """Gather a 1-D tensor of which each rank has its part, in the order of ranks, and return the work."""
        return self._issue("gather", whole)

    def scatter(self, whole: torch.Tensor, part: torch.Tensor) -> Any:
        """Sum a 1-D tensor over the group, give each rank its part of the sum, and return the work."""
        return self._issue("scatter", whole, part)

    def maximum(self, tensor: torch.Tensor) -> None:
        """Replace a tensor with the maximum over the group, which the host may read at once."""
        self.wait_on_host(self._issue("maximum", tensor))

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Replace a tensor with that of a global rank."""
        self.wait(self.start_broadcast(tensor, source))

    def start_broadcast(self, tensor: torch.Tensor, source: int) -> Any:
        """Begin to replace a tensor with that of a global rank, and return the work."""
        return self._issue(f"broadcast from {source}", tensor)

    def offer_hook(self, name: str, hook: Callable[[torch.Tensor], Any]) -> None:
        """Register a user's reduction hook for this step."""
        self._hooks[name] = hook

    def run_hook(self, name: str, tensor: torch.Tensor) -> Any:
        """Reduce a tensor with a registered hook, and return its future."""
        return self._issue(name, tensor)

    def orders_streams(self, device: torch.device) -> bool:
        """Whether streams of a device wait for the group's collectives on its tensors, and not the host."""
        return orders_streams(self._runtime.process_groups[self._group], device)

    def wait(self, work: Any) -> None:
        """Have what this thread computes from now on follow a collective, watching for a failure elsewhere.

        The host may read the result after :meth:`finish`.
        """
        place = self._place_of(work)
        group = self._runtime.process_groups[self._group]
        self._runtime[QueuedCollectives].wait(work, group, self._devices[place], self.ranks, self._number(place))
        self.works[place] = None

    def wait_on_host(self, work: Any) -> None:
        """Wait for a collective whose result the host reads, watching for a failure elsewhere."""
        place = self._place_of(work)
        wait_collective(self._runtime, work, self.ranks, self._number(place))
        self.works[place] = None

    def finish(self) -> None:
        """Wait until everything that was to follow a collective can: all of them are over."""
        self._runtime[QueuedCollectives].finish()

    def _place_of(self, work: Any) -> int:
        return next(n for n, other in enumerate(self.works) if other is work)

    def _number(self, place: int) -> int:
        return self.begun - len(self.works) + 1 + place

    def begin_step(self) -> None:
        """Finish the collectives of earlier failed steps.

        Raises:
            RemoteError: The step that begins has failed elsewhere, or a rank of the group is gone.
        """
        self._settle(None)
        self.forget_works()
        self._hooks.clear()

    def begin_between_steps(self) -> None:
        """Finish the collectives of earlier failed steps, before some are issued between steps.

        Raises:
            RemoteError: The next step has failed elsewhere, or a rank of the group is gone.
        """
        self._settle(None)

    def end_step(self) -> None:
        """The step succeeded: all that was issued is through, and its memory may go."""
        self._issued.clear()
        self.forget_works()

    def forget_works(self) -> None:
        """Forget all that is through, whose memory may go."""
        self.works.clear()
        self._devices.clear()

    @property
    def has_unfinished(self) -> bool:
        """Whether collectives may have been issued here that other ranks will never issue."""
        return bool(self._unsettled)

    def abandon_step(self, waits: bool = True) -> None:
        """Handle a failed step: exchange what was issued, and issue what other ranks have issued and this rank has not.

        Without ``waits``, what the others have issued is left to the next step, if there is one.
        """
        runtime = self._runtime
        issued = list(self._issued)
        self._issued.clear()
        self._unsettled[runtime.step.number] = issued
        for rank in self._others():
            try:
                send_on(runtime, rank, self._channel(runtime.step.number), issued)
            except Exception:  # it is gone, which the next step will see
                runtime.logger.debug("rank %d is not told of collectives", rank, exc_info=True)
        if not waits:
            return
        try:
            self._settle(time.monotonic() + _SETTLE_TIMEOUT_SECONDS)
        except Exception:  # a rank is busy or gone, which the next step will see; this one has an error already
            runtime.logger.debug("collectives of a failed step are left unfinished", exc_info=True)

    def _issue(self, kind: str, tensor: torch.Tensor, *more: torch.Tensor) -> Any:
        issued = (kind, tensor.numel(), str(tensor.dtype).removeprefix("torch."), tensor.device.type)
        with DeferSignals():  # one that has begun and is not listed would meet another one of the other ranks
            work = self._start(kind, tensor, *more)
            self._issued.append(issued)
        return work

    def _start(self, kind: str, tensor: torch.Tensor, *more: torch.Tensor) -> Any:
        group = self._runtime.process_groups[self._group]
        work: Any
        if kind == "sum":
            work = dist.all_reduce(tensor, group=group, async_op=True)
        elif kind == "maximum":
            work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group, async_op=True)
        elif kind == "gather":
            work = dist.all_gather_into_tensor(tensor, self._part(tensor), group=group, async_op=True)
        elif kind == "scatter":
            (part,) = more or (torch.empty_like(self._part(tensor)),)
            if not orders_streams(group, tensor.device):
                work = _SummedWhenReceived(tensor, part, group)
            else:
                work = dist.reduce_scatter_tensor(part, tensor, group=group, async_op=True)
        elif kind.startswith("reduce to "):
            work = dist.reduce(tensor, int(kind.removeprefix("reduce to ")), group=group, async_op=True)
        elif kind in self._hooks:
            work = self._hooks[kind](tensor)
        else:
            work = dist.broadcast(tensor, int(kind.removeprefix("broadcast from ")), group=group, async_op=True)
        self.works.append(work)
        self._devices.append(tensor.device)
        self.begun += 1
        return work

    def _part(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of a 1-D tensor."""
        return tensor.chunk(len(self.ranks))[self.own_place]

    def _settle(self, deadline: float | None) -> None:
        runtime = self._runtime
        for step, issued in list(self._unsettled.items()):
            longest = issued
            for rank in self._others():
                theirs = self._received.get((step, rank))
                if theirs is None:
                    theirs = self._received[step, rank] = receive_on(runtime, rank, self._channel(step), deadline)
                longest = max(longest, theirs, key=len)
            with DeferSignals():
                for kind, count, dtype, device in longest[len(issued) :]:
                    on = device_here(device)
                    self._start(kind, torch.zeros(count, dtype=getattr(torch, dtype), device=on))
                del self._unsettled[step]
        self._received.clear()

    def _others(self) -> list[int]:
        return [rank for rank in self.ranks if rank != self._runtime.place.rank]

    def _channel(self, step: int) -> str:
        return f"collectives of {self._group} in step {step}"


class _SummedWhenReceived:
    """A sum of which each rank gets its part. That of Gloo says that it has ended only to who waits until it has."""

    def __init__(self, tensor: torch.Tensor, part: torch.Tensor, group: Any) -> None:
        self._received = torch.empty_like(tensor)
        self._part = part
        self._work = dist.all_to_all_single(self._received, tensor, group=group, async_op=True)
        self._is_summed = False

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self, *timeout: Any) -> None:
        self._work.wait(*timeout)
        if not self._is_summed:
            torch.sum(self._received.view(-1, self._part.numel()), 0, out=self._part)
            self._is_summed = True
