"""Gloo's ``send`` and ``recv`` through ``torch.distributed``, on no core in particular: pinned it stalls."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benches.communication.ours import pattern


class Gloo:
    """One rank of two; see :class:`benches.communication.rank.Endpoint`."""

    def __init__(self) -> None:
        """Join the group."""
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self._other = 1 - self.rank
        self._outgoing = self._incoming = torch.empty(0)
        self._one = torch.zeros(1, dtype=torch.uint8)

    def prepare(self, size: int) -> None:
        self._outgoing = pattern(size)
        self._incoming = torch.zeros(size, dtype=torch.uint8)

    def send(self) -> None:
        dist.send(self._outgoing, self._other)

    def receive(self) -> None:
        dist.recv(self._incoming, self._other)

    def matches(self) -> bool:
        return torch.equal(self._incoming, self._outgoing)

    def send_many(self, count: int) -> None:
        for work in [dist.isend(self._outgoing, self._other) for _ in range(count)]:
            assert work is not None
            work.wait()

    def receive_many(self, count: int) -> None:
        for work in [dist.irecv(self._incoming, self._other) for _ in range(count)]:
            assert work is not None
            work.wait()

    def acknowledge(self) -> None:
        dist.send(self._one, self._other)

    def await_acknowledgement(self) -> None:
        dist.recv(self._one, self._other)

    def close(self) -> None:
        dist.destroy_process_group()
