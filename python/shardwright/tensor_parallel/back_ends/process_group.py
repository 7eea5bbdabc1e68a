"""Collectives by a process group of ``torch.distributed``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwright.job.queued import QueuedCollectives, end_collectives
from shardwright.job.runtime import Runtime
from shardwright.tensor_parallel.packing import Pending


class ByProcessGroup:
    """See :class:`shardwright.tensor_parallel.back_ends.BackEnd`: Gloo's for tensors on the CPU, NCCL's on GPUs."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        wait: Callable[[Any, dist.ProcessGroup, torch.device], None] | None = None,
        renewed: Callable[[dist.ProcessGroup], None] | None = None,
    ) -> None:
        """For a group.

        Args:
            group: The first group.
            wait: Has what follows wait for a collective's work, given its group and the device of its tensors; by
                default its own method.
            renewed: Called with the group that has taken the place of another one.
        """
        self._group = group
        self._wait = wait
        self._renewed = renewed
        self._device = torch.device("cpu")
        self._works: list[Any] = []
        self._abandoned = False
        self.unfinished: list[Any] = []

    @classmethod
    def of_rank(cls, runtime: Runtime, group: dist.ProcessGroup) -> ByProcessGroup:
        """For a rank's TP_GROUP, whose collectives are watched."""
        wait = functools.partial(runtime[QueuedCollectives].wait, ranks=runtime.place.tp_ranks, renewed=True)
        return cls(group, wait, functools.partial(runtime.process_groups.__setitem__, "TP_GROUP"))

    def all_gather(
        self, own: torch.Tensor, lengths: Sequence[int], into: torch.Tensor | None = None
    ) -> Pending[list[torch.Tensor]]:
        """See the protocol."""
        buffer = own.new_empty(sum(lengths)) if into is None else into
        if len({*lengths}) == 1:
            work, sent = dist.all_gather_into_tensor(buffer, own, group=self._group, async_op=True), own
        else:  # Gloo refuses parts of several sizes; an all-to-all of copies sends no byte more than it must
            sent = own.repeat(len(lengths))
            work = self._all_to_all(buffer, sent, lengths, [own.numel()] * len(lengths))
        return self._pending(work, sent, lambda: list(torch.split(buffer, list(lengths))))

    def all_to_all(self, own: torch.Tensor, sent: Sequence[int], lengths: Sequence[int]) -> Pending[list[torch.Tensor]]:
        """See the protocol."""
        buffer = own.new_empty(sum(lengths))
        work = self._all_to_all(buffer, own, lengths, sent)
        return self._pending(work, own, lambda: list(torch.split(buffer, list(lengths))))

    def all_reduce(self, total: torch.Tensor) -> Pending[torch.Tensor]:
        """See the protocol; the back end rounds half precision at every addition."""
        # No back end sums int16; the wider sum wraps to the same.
        summed = total.to(torch.int32) if total.dtype == torch.int16 else total
        work = dist.all_reduce(summed, group=self._group, async_op=True)
        return self._pending(work, summed, lambda: total if summed is total else total.copy_(summed))

    def begin_step(self) -> None:
        """See the protocol: after a failed step with a group of its own."""
        self._works.clear()
        if self._abandoned:
            ranks = dist.get_process_group_ranks(self._group)
            self._group = dist.new_group(ranks, use_local_synchronization=True)
            self._abandoned = False
            if self._renewed is not None:
                self._renewed(self._group)

    def abandon_step(self) -> None:
        """See the protocol."""
        if not self._abandoned:
            self._abandoned = True
            self.unfinished += [self._group, *self._works]
            end_collectives(self._group, self._device)  # for which streams wait

    def _all_to_all(self, buffer: torch.Tensor, own: torch.Tensor, lengths: Sequence[int], sent: Sequence[int]) -> Any:
        return dist.all_to_all_single(buffer, own, list(lengths), list(sent), group=self._group, async_op=True)

    def _pending(self, work: Any, sent: torch.Tensor, result: Callable[[], Any]) -> Pending[Any]:
        group, self._device = self._group, sent.device

        def finish(_sent: torch.Tensor = sent) -> Any:
            self._works = [work]  # of several none but the last is unfinished
            if self._wait is None:
                work.wait()
            else:
                self._wait(work, group, _sent.device)
            return result()

        return finish
