"""A distributed sampler that divides samples over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler as TorchSampler

from shardwright.job.runtime import current_runtime


class DistributedSampler(TorchSampler[Any]):
    """Divides a data set over data-parallel ranks, so that all ranks of a pipeline get the same samples.

    torch's own sampler divides by the number of processes: the ranks of a pipeline would get different samples, of
    which only those of the first rank are used. The state dict contains the number of samples drawn in this epoch, so
    that training can be resumed. With the key ``prescaled_batch``, tensor-parallel ranks get the same samples.

    Use it as ``DataLoader(dataset, batch_size, sampler=smp.DistributedSampler(dataset))``, and call :meth:`set_epoch`
    before each epoch. With ``num_workers > 0``, a loader draws samples ahead of training: save the state between
    epochs, or set :attr:`taken` to the number of samples that this rank has trained on.

    Attributes:
        taken: The number of samples drawn in this epoch.
    """

    def __init__(self, dataset: Dataset[Any], *, shuffle: bool = True, seed: int = 0, drop_last: bool = False) -> None:
        """Create the sampler.

        Args:
            dataset: A data set with a length.
            shuffle: Shuffle the samples, in a different order in every epoch.
            seed: The seed of the order; the same on every rank.
            drop_last: Drop the last samples if they do not divide evenly over ranks, instead of repeating some.
        """
        runtime = current_runtime()
        ranks = runtime.place.sample_ranks
        super().__init__(
            dataset,
            num_replicas=len(ranks),
            rank=ranks.index(runtime.place.rank),
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
        self.taken = 0
        self._resumes = False

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this rank's indices of the epoch; after :meth:`load_state_dict`, over the remaining ones."""
        self.taken, self._resumes = self.taken if self._resumes else 0, False
        for index in list(super().__iter__())[self.taken :]:
            self.taken += 1
            yield index

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order; one other than that of a loaded state starts at its beginning."""
        self._resumes = self._resumes and epoch == self.epoch
        super().set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, the seed, and the number of samples that this rank has drawn in the epoch."""
        return {"epoch": self.epoch, "taken": self.taken, "seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resume from the result of :meth:`state_dict`.

        Raises:
            ValueError: The state has another seed, or more samples than a rank gets.
        """
        if state["seed"] != self.seed:
            raise ValueError(f"the sampler's state has seed {state['seed']}, but this sampler seed {self.seed}")
        if not 0 <= state["taken"] <= self.num_samples:
            raise ValueError(f"the sampler's state has {state['taken']} samples of 0 to {self.num_samples} taken")
        self.epoch, self.taken, self._resumes = state["epoch"], state["taken"], True
