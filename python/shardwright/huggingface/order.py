"""The order of samples that a sampler draws from the script's random numbers: on all ranks that of the first one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from shardwright.checkpoints import random_state
from shardwright.errors import ConfigError
from shardwright.job.objects import allgather
from shardwright.job.ranks import WORLD, rank

Streams = dict[str, torch.Tensor]


class OrderOfFirstRank(Sampler[Any]):
    """Gives the samples of another sampler in the order in which rank 0 has drawn them. All ranks iterate over it."""

    def __init__(self, sampler: Any) -> None:
        """Of a sampler of finite length."""
        self._sampler = sampler
        #: The streams of random numbers with which the order of the epoch was drawn.
        self.began: Streams | None = None
        #: Those with which the next one is, in place of the script's: of an epoch that is resumed.
        self.next: Streams | None = None

    def __iter__(self) -> Iterator[Any]:
        """Return the samples of an epoch."""
        of_script = None
        if self.next is not None:
            of_script = random_state.streams()
            random_state.restore(self.next)
            self.next = None
        self.began = random_state.streams()
        order = list(self._sampler)  # on every rank, so that all draw as many random numbers
        if of_script is not None:
            random_state.restore(of_script)
        if all(type(one) is int for one in order):
            yield from allgather(torch.tensor(order) if rank() == 0 else None, WORLD)[0].tolist()
        else:
            yield from allgather(order if rank() == 0 else None, WORLD)[0]

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the sampler."""
        if name == "_sampler":  # of an object that is being made
            raise AttributeError(name)
        return getattr(self._sampler, name)


#: What accelerate gives all ranks the same order of, or what has a share of the samples.
_KNOWN = (RandomSampler, SequentialSampler, DistributedSampler, BatchSampler, OrderOfFirstRank)


def ordered(sampler: Any) -> Any:
    """Return a sampler whose order is that of rank 0, of one that a trainer has made; as it is, if that is known."""
    is_known = isinstance(sampler, _KNOWN)
    return sampler if is_known or sampler is None or not hasattr(sampler, "__len__") else OrderOfFirstRank(sampler)


def order_in(loader: DataLoader[Any]) -> Any:
    """Let a loader that a class has made itself give its samples in the order of rank 0, in place; return its order."""
    batches = loader.batch_sampler
    if type(batches) is BatchSampler and not isinstance(batches.sampler, (SequentialSampler, OrderOfFirstRank)):
        batches.sampler = OrderOfFirstRank(batches.sampler)
    return getattr(batches, "sampler", None)


def order_of(trainer: Any) -> Streams | None:
    """Return with what the order of the epoch was drawn in which a trainer is. All ranks call this.

    Returns:
        The streams of rank 0, on all ranks; None if the order does not depend on them, or none of it is left.
    """
    order, is_within = trainer._order_of_samples, not float(trainer.state.epoch or 0).is_integer()
    own = order.began if isinstance(order, OrderOfFirstRank) and is_within else None
    began: Streams | None = allgather(own if rank() == 0 else None, WORLD)[0]
    return began


def go_on_in(trainer: Any, began: Streams | None) -> None:
    """Let the next epoch of a trainer have an order that was drawn before."""
    if isinstance(trainer._order_of_samples, OrderOfFirstRank):
        trainer._order_of_samples.next = began


def has_own_share(loader: DataLoader[Any], name: str, replicas: int, replica: int) -> bool:
    """Return whether a loader has a replica's own share of the samples already.

    Raises:
        ConfigError: It has the share of another process than this replica.
    """
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if not isinstance(sampler, DistributedSampler):
        return False
    if (sampler.num_replicas, sampler.rank) != (replicas, replica):
        raise ConfigError(
            f"{name} returned a loader with a DistributedSampler for process {sampler.rank} of {sampler.num_replicas}; "
            f"allowed here: {replica} of {replicas}, which self.args.process_index and self.args.world_size are, since "
            "the ranks of a pipeline read the same samples; or a loader of all samples"
        )
    return True
