"""Collectives by the library's own messages, for tensors on the CPU: within a host they go through shared memory.

A tensor is copied once, into memory that its receiver maps and reads in place, and whoever waits for it receives it
itself; Gloo copies it through sockets, by a thread of its own (docs/measurements/tensor-parallelism.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwright.errors import ConfigError
from shardwright.job.exchange import receive_object, send_object
from shardwright.job.received import decode_from
from shardwright.job.runtime import Runtime
from shardwright.tensor_parallel.packing import Pending, sum_in_order
from shardwright.values import encode

_CHANNEL = "tensor_parallel"


class ByMessages:
    """See :class:`shardwright.tensor_parallel.back_ends.BackEnd`.

    Each tensor has the number of its collective, for collectives may end in another order than they began.
    """

    def __init__(self, runtime: Runtime, ranks: Sequence[int]) -> None:
        """For some ranks of the job, in the order of the group."""
        self._runtime = runtime
        self._ranks = list(ranks)
        self._own = self._ranks.index(runtime.place.rank)
        self._next = 0
        self._early: dict[tuple[int, int], torch.Tensor] = {}
        self._abandoned = False
        self.unfinished: list[Any] = []

    def all_gather(
        self, own: torch.Tensor, lengths: Sequence[int], into: torch.Tensor | None = None
    ) -> Pending[list[torch.Tensor]]:
        """See the protocol."""
        number = self._begin([own] * len(self._ranks))
        places = None if into is None else torch.split(into, list(lengths))

        def finish() -> list[torch.Tensor]:
            pieces = self._receive(number, own, [torch.Size([length]) for length in lengths])
            if places is None:
                return pieces
            return [place.copy_(piece) for place, piece in zip(places, pieces, strict=True)]

        return finish

    def all_to_all(self, own: torch.Tensor, sent: Sequence[int], lengths: Sequence[int]) -> Pending[list[torch.Tensor]]:
        """See the protocol."""
        pieces = torch.split(own, list(sent))
        number = self._begin(pieces)
        return lambda: self._receive(number, pieces[self._own], [torch.Size([length]) for length in lengths])

    def all_reduce(self, total: torch.Tensor) -> Pending[torch.Tensor]:
        """See the protocol: the sum is made in the order of ranks; half precision in single, rounded once."""
        size = len(self._ranks)
        if size == 2:
            number = self._begin([total, total])

            def add() -> torch.Tensor:
                return total.add_(self._receive(number, total, [total.shape] * 2)[1 - self._own])

            return add
        flat = total.view(-1)
        slices = torch.tensor_split(flat, size)
        number, gathering = self._begin(slices), self._number()

        def finish() -> torch.Tensor:
            own = slices[self._own]
            summed = sum_in_order(self._receive(number, own, [own.shape] * size))
            self._send_all(gathering, [summed] * size)
            pieces = self._receive(gathering, summed, [one.shape for one in slices])
            for place, piece in zip(slices, pieces, strict=True):
                place.copy_(piece)
            return total

        return finish

    def begin_step(self) -> None:
        """See the protocol: what the others sent in the failed step is received and forgotten."""
        if not self._abandoned:
            return
        # In place of a collective's number: nothing of failed steps comes after it. One that began this step and did
        # not come so far has a mark of its own.
        mark = -self._runtime.step.number
        for rank in self._peers():
            self._send(rank, mark, torch.empty(0))
        for rank in self._peers():
            while self._receive_next(rank)[0] != mark:
                pass
        self._early.clear()
        self._next = 0
        self._abandoned = False

    def abandon_step(self) -> None:
        """See the protocol."""
        self._abandoned = True

    def _peers(self) -> list[int]:
        return [rank for index, rank in enumerate(self._ranks) if index != self._own]

    def _begin(self, outgoing: Sequence[torch.Tensor]) -> int:
        """Send each rank its tensor; the collective's number."""
        number = self._number()
        self._send_all(number, outgoing)
        return number

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _send_all(self, number: int, outgoing: Sequence[torch.Tensor]) -> None:
        for index, rank in enumerate(self._ranks):
            if index != self._own:
                self._send(rank, number, outgoing[index])

    def _send(self, rank: int, number: int, tensor: torch.Tensor) -> None:
        send_object(self._runtime, rank, _CHANNEL, *encode((number, tensor.detach())))

    def _receive(self, number: int, own: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
        """The tensor of every rank; of others in memory that goes back to the sender when they are freed."""
        found = []
        for index, (rank, shape) in enumerate(zip(self._ranks, shapes, strict=True)):
            tensor = own if index == self._own else self._receive_of(rank, number)
            if tensor.shape != shape or tensor.dtype != own.dtype:
                raise ConfigError(
                    f"all tp ranks have to call the same collective together, but rank {rank} sent {tensor.dtype} of "
                    f"{list(tensor.shape)} where rank {self._ranks[self._own]} expected {own.dtype} of {list(shape)}"
                )
            found.append(tensor)
        return found

    def _receive_of(self, rank: int, number: int) -> torch.Tensor:
        early = self._early.pop((rank, number), None)
        if early is not None:
            return early
        while True:
            of, tensor = self._receive_next(rank)
            if of == number:
                return tensor
            self._early[rank, of] = tensor

    def _receive_next(self, rank: int) -> tuple[int, torch.Tensor]:
        what = f"a collective of ranks {self._ranks}"
        received = receive_object(self._runtime, rank, _CHANNEL, what=what)
        number, tensor = decode_from(self._runtime, rank, *received)
        return number, tensor
