"""Open MPI through ``mpi4py``; runs in the environment of ``requirements/bench.txt``, which has no torch."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI  # type: ignore[import-not-found]


class OpenMpi:
    """One rank of two; see :class:`benches.communication.rank.Endpoint`."""

    def __init__(self) -> None:
        """Join the world."""
        self._world = MPI.COMM_WORLD
        self.rank: int = self._world.Get_rank()
        self._other = 1 - self.rank
        self._outgoing = self._incoming = np.zeros(0, np.uint8)
        self._one = np.zeros(1, np.uint8)

    def prepare(self, size: int) -> None:
        self._outgoing = np.resize(np.arange(251, dtype=np.uint8), size)
        self._incoming = np.zeros(size, np.uint8)

    def send(self) -> None:
        self._world.Send(self._outgoing, self._other)

    def receive(self) -> None:
        self._world.Recv(self._incoming, self._other)

    def matches(self) -> bool:
        return bool(np.array_equal(self._incoming, self._outgoing))

    def send_many(self, count: int) -> None:
        MPI.Request.Waitall([self._world.Isend(self._outgoing, self._other) for _ in range(count)])

    def receive_many(self, count: int) -> None:
        MPI.Request.Waitall([self._world.Irecv(self._incoming, self._other) for _ in range(count)])

    def acknowledge(self) -> None:
        self._world.Send(self._one, self._other)

    def await_acknowledgement(self) -> None:
        self._world.Recv(self._one, self._other)

    def close(self) -> None:
        MPI.Finalize()
