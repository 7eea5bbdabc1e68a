"""The samples of this rank's pipeline: torch's distributed sampler over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler as TorchSampler

from shardwright.job.runtime import current_runtime


class DistributedSampler(TorchSampler[Any]):
    """Divides a data set over data-parallel ranks, so that all ranks of a pipeline get the same samples.

    torch's own sampler divides by the number of processes: the ranks of a pipeline would get different samples, of
    which only those of the first are used. It goes on where it was: its state dict counts the samples that it has
    handed out in this epoch. With the key ``prescaled_batch``, tensor-parallel ranks get the same samples too.

    Usable as ``DataLoader(dataset, batch_size, sampler=smp.DistributedSampler(dataset))``; call :meth:`set_epoch`
    before each epoch. With ``num_workers > 0`` a loader takes samples ahead of the training: save the state between
    epochs, or set :attr:`taken` to the number of samples that this rank has trained on.

    Attributes:
        taken: How many samples of this epoch were handed out.

    Raises:
        ShardwrightError: ``smp.init`` was not called.
    """

    def __init__(self, dataset: Dataset[Any], *, shuffle: bool = True, seed: int = 0, drop_last: bool = False) -> None:
        """Divide a data set.

        Args:
            dataset: A data set with a length.
            shuffle: Draw another order in every epoch.
            seed: Of the order; the same on every rank.
            drop_last: Leave out samples that do not fill all ranks, instead of repeating some.
        """
        runtime = current_runtime()
        ranks = runtime.place.rdp_ranks if runtime.place.cfg.prescaled_batch else runtime.place.dp_ranks
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
        """This rank's indices: all of an epoch, but after :meth:`load_state_dict` once those that were left of it."""
        self.taken, self._resumes = self.taken if self._resumes else 0, False
        for index in list(super().__iter__())[self.taken :]:
            self.taken += 1
            yield index

    def set_epoch(self, epoch: int) -> None:
        """Give an epoch its order; another one than that of a loaded state begins at its start."""
        self._resumes = self._resumes and epoch == self.epoch
        super().set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many samples of it this rank was given."""
        return {"epoch": self.epoch, "taken": self.taken, "seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where the state dict was taken.

        Raises:
            ValueError: It was taken with another seed, or has more samples than a rank gets.
        """
        if state["seed"] != self.seed:
            raise ValueError(f"the sampler's state has seed {state['seed']}, but this sampler seed {self.seed}")
        if not 0 <= state["taken"] <= self.num_samples:
            raise ValueError(f"the sampler's state has {state['taken']} samples of 0 to {self.num_samples} taken")
        self.epoch, self.taken, self._resumes = state["epoch"], state["taken"], True
