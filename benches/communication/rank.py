"""One of the two processes that measure: does what the starting process tells it over a Unix socket.

usage: python -m benches.communication.rank KIND SOCKET, where KIND is a name in ``KINDS``
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from typing import Any, Protocol

from benches.ranks import serve

#: Where each kind's class is; imported by the processes that use it only, since Open MPI's have no torch.
KINDS = {
    "shardwright": "benches.communication.ours:Shardwright",
    "gloo": "benches.communication.gloo:Gloo",
    "mpi": "benches.communication.mpi:OpenMpi",
    "beside": "benches.communication.beside:Beside",
}


class Endpoint(Protocol):
    """One end of a path between two ranks. Buffers are kept from one message to the next."""

    rank: int

    def prepare(self, size: int) -> None:
        """Make the buffers for messages of this many bytes; the sender's holds a pattern."""

    def send(self) -> None:
        """Send one message and go on as soon as the path lets us."""

    def receive(self) -> None:
        """Wait for one message."""

    def matches(self) -> bool:
        """Whether the message received last holds the pattern."""

    def send_many(self, count: int) -> None:
        """Send messages, all in flight at once where the path can."""

    def receive_many(self, count: int) -> None:
        """Wait for messages sent by :meth:`send_many`."""

    def acknowledge(self) -> None:
        """Send the shortest message there is."""

    def await_acknowledgement(self) -> None:
        """Wait for it."""

    def close(self) -> None:
        """Leave."""


def round_trips(endpoint: Endpoint, count: int, pause: float) -> list[float]:
    """Microseconds: on rank 0 of each round trip, on rank 1 of each time that it held the message.

    With a pause each side waits that long before it sends, so that the other one has fallen asleep.
    """
    now, sleep = time.perf_counter, time.sleep
    taken = []
    for _ in range(count):
        if endpoint.rank == 0:
            if pause:
                sleep(pause)
            began = now()
            endpoint.send()
            endpoint.receive()
            taken.append(now() - began)
        else:
            endpoint.receive()
            began = now()
            if pause:
                sleep(pause)
                taken.append(now() - began)
            endpoint.send()
    return [1e6 * seconds for seconds in taken]


def streams(endpoint: Endpoint, count: int, window: int) -> list[float]:
    """Microseconds, on rank 0, of each window of messages until its acknowledgement."""
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        if endpoint.rank == 0:
            endpoint.send_many(window)
            endpoint.await_acknowledgement()
            taken.append(1e6 * (time.perf_counter() - began))
        else:
            endpoint.receive_many(window)
            endpoint.acknowledge()
    return taken


class Messages:
    """What a pair of endpoints can be told."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Take the endpoint over."""
        self._endpoint = endpoint
        self.rank = endpoint.rank

    def prepare(self, size: int) -> bool:
        """Make the buffers; whether a message arrives as it was sent."""
        endpoint = self._endpoint
        endpoint.prepare(size)
        if endpoint.rank == 0:
            endpoint.send()
            endpoint.await_acknowledgement()
            return True
        endpoint.receive()
        intact = endpoint.matches()
        endpoint.acknowledge()
        return intact

    def latency(self, count: int, pause: float = 0.0) -> Any:
        """The median of the round trips in microseconds; with a pause all of them, or all the times held."""
        taken = round_trips(self._endpoint, count, pause)
        return taken if pause else statistics.median(taken or [0.0])

    def stream(self, count: int, window: int) -> float:
        """The median time of a window in microseconds."""
        return statistics.median(streams(self._endpoint, count, window) or [0.0])

    def close(self) -> None:
        """Leave."""
        self._endpoint.close()


def main() -> None:
    kind, address = sys.argv[1:]
    module, _, name = KINDS[kind].partition(":")
    made = getattr(importlib.import_module(module), name)()
    served: Any = made if kind == "beside" else Messages(made)
    serve(served, address)


if __name__ == "__main__":
    main()
