"""The library's own path, as a script uses it: tensors given to ``smp.send`` and taken from ``smp.recv_from``."""

from __future__ import annotations

import shardwright as smp
import torch


def pattern(size: int) -> torch.Tensor:
    """Bytes whose order matters."""
    return torch.arange(251, dtype=torch.uint8).repeat(size // 251 + 1)[:size].clone()


class Shardwright:
    """One rank of two; see :class:`benches.communication.rank.Endpoint`."""

    def __init__(self) -> None:
        """Join the job."""
        smp.init({"pipeline_parallel_degree": 2})
        self.rank = smp.rank()
        self._other = 1 - self.rank
        self._size = 0
        self._outgoing = torch.empty(0)
        self._received: torch.Tensor | None = None

    def prepare(self, size: int) -> None:
        self._received = None
        self._size = size
        self._outgoing = pattern(size)

    def send(self) -> None:
        smp.send(self._outgoing, self._other, smp.RankType.WORLD_RANK)

    def receive(self) -> None:
        # The tensor before it is given back only now: the library can use its memory for the next but one.
        self._received = smp.recv_from(self._other, smp.RankType.WORLD_RANK)

    def matches(self) -> bool:
        return self._received is not None and torch.equal(self._received, pattern(self._size))

    def send_many(self, count: int) -> None:
        for _ in range(count):
            self.send()

    def receive_many(self, count: int) -> None:
        for _ in range(count):
            self.receive()

    def acknowledge(self) -> None:
        smp.send(None, self._other, smp.RankType.WORLD_RANK)

    def await_acknowledgement(self) -> None:
        smp.recv_from(self._other, smp.RankType.WORLD_RANK)

    def close(self) -> None:
        self._received = None
        smp.shutdown()
