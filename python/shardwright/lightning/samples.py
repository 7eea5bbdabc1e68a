"""Data loaders, each with the samples of its rank; all ranks shuffle alike."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.data import has_iterable_dataset
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from lightning.pytorch.trainer.connectors.data_connector import _get_distributed_sampler
from lightning.pytorch.utilities.data import _update_dataloader
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler


def divided(dataloader: DataLoader[Any], trainer: Any, num_replicas: int, rank: int) -> DataLoader[Any]:
    """Return a loader of the samples of this rank, which are shuffled if those of the loader are."""
    sampler = dataloader.sampler
    if (
        not trainer._accelerator_connector.use_distributed_sampler
        or isinstance(sampler, DistributedSampler)
        or has_iterable_dataset(dataloader)
    ):
        return dataloader
    shuffled = isinstance(sampler, RandomSampler)
    own = _get_distributed_sampler(dataloader, shuffled, trainer.overfit_batches, num_replicas=num_replicas, rank=rank)
    made: DataLoader[Any] = _update_dataloader(dataloader, own)
    return made


def share_seeds(dataloader: DataLoader[Any], num_replicas: int, rank: int) -> None:
    """Let samplers draw the same numbers on all ranks, and workers those of a place among ranks with different samples.

    Steps draw random numbers on each rank, so that the generators of the process differ between ranks.

    Raises:
        MisconfigurationException: A sampler divides samples over other ranks, or gives none to some of them.
    """
    if int(os.environ.get("PL_SEED_WORKERS", "0")) and dataloader.worker_init_fn is None:
        dataloader.worker_init_fn = partial(pl_worker_init_function, rank=rank)
    for sampler in (dataloader.sampler, getattr(dataloader.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            _check(sampler, num_replicas, rank)
        wrapper: Any = sampler
        _share_seed(wrapper.dataset._sampler if isinstance(sampler, DistributedSamplerWrapper) else sampler)


def _check(sampler: Any, replicas: int, rank: int) -> None:
    if (sampler.num_replicas, sampler.rank) != (replicas, rank):
        raise MisconfigurationException(
            f"a sampler divides samples by {sampler.num_replicas}, and this is rank {rank} of {replicas} with "
            "different samples: leave the sampler out, or use `smp.DistributedSampler`"
        )
    if isinstance(sampler, UnrepeatedDistributedSampler) and 0 < sampler.total_size < replicas:
        raise MisconfigurationException(
            f"{sampler.total_size} samples are to be predicted by {replicas} ranks with different samples; allowed are "
            "as many as ranks, or more"
        )


def _share_seed(sampler: Any) -> None:
    if getattr(sampler, "generator", sampler) is not None or hasattr(sampler, "set_epoch"):
        return
    seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
    generator = sampler.generator = torch.Generator().manual_seed(seed)
    # Lightning calls it at the beginning of each epoch, that of a resumed training too.
    sampler.set_epoch = lambda epoch: generator.manual_seed(seed + epoch)
