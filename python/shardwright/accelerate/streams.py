"""How many samples the last batch has of a data set without a length, so that those that fill it up do not count."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate.data_loader import DataLoaderShard, IterableDatasetShard
from accelerate.utils import find_batch_size
from torch.utils.data import IterableDataset


class CountedShard(IterableDatasetShard):  # type: ignore[misc]
    """The samples of one replica; knows how many the last batch of all replicas has before it is filled up."""

    remainder = -1
    dataset: Any

    def __iter__(self) -> Iterator[Any]:
        """Return the samples."""
        self.remainder, counted = -1, _Counted(self.dataset)
        self.dataset, whole = counted, self.dataset
        try:
            for sample in super().__iter__():
                # Those of a batch are handed out once all of it is read; the rest of the last one, once all is read.
                self.remainder = counted.number % self._of_all if counted.ended else -1
                yield sample
        finally:
            self.dataset = whole

    @property
    def _of_all(self) -> int:
        return int(self.batch_size if self.split_batches else self.batch_size * self.num_processes)


class _Counted:
    """A data set that counts what is read of it."""

    def __init__(self, dataset: Any) -> None:
        self._dataset, self.number, self.ended = dataset, 0, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __iter__(self) -> Iterator[Any]:
        for one in self._dataset:
            self.number += 1
            yield one
        self.ended = True


class CountingLoader(DataLoaderShard):  # type: ignore[misc]
    """Tells of its last batch how many samples it has, of all replicas."""

    def __iter__(self) -> Iterator[Any]:
        """Return the batches."""
        for batch in super().__iter__():
            if self.end_of_dataloader:
                counted = self.dataset.remainder if isinstance(self.dataset, CountedShard) else find_batch_size(batch)
                self.remainder = -1 if counted is None else counted
            yield batch


def counted(loader: Any) -> Any:
    """Let a prepared loader of a data set without a length say how many samples its last batch has.

    Workers read the data set in other processes, and do not say how many samples they have filled it up with.
    """
    if type(loader) is DataLoaderShard and isinstance(loader.dataset, IterableDataset) and not loader.num_workers:
        # What accelerate says is its class is another's, and cannot be set.
        vars(object)["__class__"].__set__(loader, CountingLoader)
        if type(loader.dataset) is IterableDatasetShard:
            loader.dataset.__class__ = CountedShard
    return loader
