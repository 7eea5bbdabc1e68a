"""What ``ray.train.get_dataset_shard`` returns: rows that one rank reads, and hands on to those that train with it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

from shardwright.errors import ConfigError, RemoteError, ShardwrightError
from shardwright.failure_text import FailureText
from shardwright.job.exchange import receive_object, send_object
from shardwright.job.received import decode_from
from shardwright.job.runtime import Runtime, current_runtime
from shardwright.values import encode

#: How many batches are on their way to a rank that has not taken them yet.
_AHEAD = 2


class Shard:
    """The rows of a data set that one replica trains on, the same for all its ranks.

    All ranks of the replica iterate alike. Rows are those of Ray's own iterator with as many workers as there are
    replicas.
    """

    def __init__(self, name: str, iterator: Any, groups: list[list[int]], *, hands_on: bool) -> None:
        """Create the shard.

        Args:
            name: The name of the data set.
            iterator: Ray's iterator, from which only the first rank reads.
            groups: The ranks of each replica, as the trainer was told.
            hands_on: Whether the other ranks get the batches, or None for each.
        """
        self.name = name
        self._iterator = iterator
        self._groups = groups
        self._hands_on = hands_on
        self._begun = 0

    def iter_torch_batches(self, **options: Any) -> Batches:
        """Return batches of tensors; the arguments are those of Ray's ``DataIterator.iter_torch_batches``."""
        return Batches(self, lambda: self._iterator.iter_torch_batches(**options))

    def iter_batches(self, **options: Any) -> Batches:
        """Return batches of arrays; the arguments are those of Ray's ``DataIterator.iter_batches``."""
        return Batches(self, lambda: self._iterator.iter_batches(**options))

    def iter_rows(self) -> Batches:
        """Return single rows."""
        return Batches(self, self._iterator.iter_rows)

    def schema(self) -> Any:
        """Return Ray's schema of the rows."""
        return self._iterator.schema()

    def stats(self) -> str:
        """Return Ray's statistics of the execution."""
        return str(self._iterator.stats())

    def begin(self, runtime: Runtime) -> tuple[int, list[int]]:
        """Begin an epoch on this rank, and return its number and the ranks that have the same rows.

        Raises:
            ConfigError: The job divides the model otherwise than the data set was divided for; on all ranks.
        """
        place = runtime.place
        actual = place.topology.groups("MP_GROUP" if place.cfg.prescaled_batch else "PP_GROUP")
        if actual != self._groups:
            raise ConfigError(
                f"data set {self.name!r} was divided for ranks {self._groups}, each of which train on the same rows, "
                f"and those of this job are {actual}: give shardwright.ray.DataConfig the configuration of smp.init"
            )
        self._begun += 1
        return self._begun, next(ranks for ranks in self._groups if place.rank in ranks)


class Batches:
    """The batches of a shard; iterating over them again begins another epoch."""

    def __init__(self, shard: Shard, read: Callable[[], Any]) -> None:
        """Let ``read`` return Ray's batches."""
        self._shard = shard
        self._read = read

    def __iter__(self) -> Iterator[Any]:
        """Return the batches of an epoch. All ranks of the replica call this alike.

        Raises:
            ConfigError: The data set was divided for another configuration.
            RemoteError: The rank that reads could not.
            PeerLostError: It is gone.
        """
        runtime = current_runtime()
        number, ranks = self._shard.begin(runtime)
        way = _Way(runtime, self._shard.name, number)
        first, *others = ranks
        return self._reading(way, others) if runtime.place.rank == first else way.batches_from(first)

    def _reading(self, way: _Way, others: list[int]) -> Iterator[Any]:
        try:
            for batch in self._read():
                way.hand_on(others, batch if self._shard._hands_on else None)
                yield batch
        except Exception as error:
            way.end(others, (socket.gethostname(), *FailureText.of(error)))
            raise
        way.end(others, None)


class _Way:
    """The way of an epoch's batches from the rank that reads them to the others.

    Messages carry the number of the epoch: what is left of one that a script has broken off is passed over.
    """

    def __init__(self, runtime: Runtime, name: str, number: int) -> None:
        self._runtime, self._name, self._number = runtime, name, number
        self._channel = f"ray data {name}"
        self._handed_on = 0

    def hand_on(self, others: list[int], batch: Any) -> None:
        """Send a batch, once the others have taken all but the last few."""
        if self._handed_on >= _AHEAD:
            for rank in others:
                self._receive(rank, f"rank {rank} to take a batch of data set {self._name!r}")
        self._handed_on += 1
        for rank in others:
            self._send(rank, "batch", batch)

    def end(self, others: list[int], failure: tuple[str, ...] | None) -> None:
        """Say that there are no more batches, and why, if an error has ended them."""
        for rank in others:
            if failure is None:
                self._send(rank, "end", None)
            else:
                with contextlib.suppress(ShardwrightError):  # one that is gone needs no word
                    self._send(rank, "failure", failure)

    def batches_from(self, first: int) -> Iterator[Any]:
        """Return the batches that a rank hands on.

        Raises:
            RemoteError: It could not read.
        """
        what = f"the next batch of data set {self._name!r}, which rank {first} reads"
        while True:
            kind, content = self._receive(first, what)
            if kind == "end":
                return
            if kind == "failure":
                host, name, message, traceback = content
                raise RemoteError(first, host, None, None, None, name, message, traceback)
            self._send(first, "taken", None)
            yield content

    def _send(self, rank: int, kind: str, content: Any) -> None:
        send_object(self._runtime, rank, self._channel, *encode((self._number, kind, content)))

    def _receive(self, rank: int, what: str) -> tuple[str, Any]:
        while True:
            received = receive_object(self._runtime, rank, self._channel, what=what)
            number, kind, content = decode_from(self._runtime, rank, *received)
            if number == self._number:
                return kind, content
            if number > self._number:
                raise ShardwrightError(
                    f"rank {self._runtime.place.rank} is in epoch {self._number} of data set {self._name!r}, and rank "
                    f"{rank} in epoch {number}: all ranks of a pipeline have to iterate over it alike"
                )
