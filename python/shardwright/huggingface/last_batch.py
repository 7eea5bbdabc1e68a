"""The last batch of an evaluation over replicas: each evaluates its own samples, and none that fill the batch up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from shardwright.huggingface.evaluation import samples_in
from shardwright.huggingface.rows import chosen_rows


class OwnSamples(BatchSamplerShard):  # type: ignore[misc]
    """Batches of one replica, of which the last is short in place of filled up.

    A replica that has no sample of the last batch evaluates those of the first one again, which count for nothing.
    """

    def __iter__(self) -> Iterator[list[int]]:
        """Return the indices of each batch."""
        if self.split_batches:
            own = self.batch_size // self.num_processes
            for batch in self.batch_sampler:
                yield batch[own * self.process_index :][:own] or batch[:own]
            return
        group: list[list[int]] = []
        for batch in self.batch_sampler:
            group.append(batch)
            if len(group) == self.num_processes:
                yield group[self.process_index]
                group = []
        if group and not self.drop_last:
            yield group[self.process_index] if self.process_index < len(group) else group[0]

    @property
    def rows(self) -> int:
        """How many samples of a batch a replica has."""
        return int(self.batch_size // (self.num_processes if self.split_batches else 1))


def of_own_samples(loader: Any) -> Any:
    """Let a prepared loader of an evaluation leave out the samples that fill up its last batch, in place."""
    sampler: Any = getattr(loader, "batch_sampler", None)
    is_known = isinstance(loader, DataLoader) and type(sampler) is BatchSamplerShard
    if is_known and sampler.num_processes > 1 and sampler.even_batches and sampler.batch_size is not None:
        sampler.__class__ = OwnSamples
    return loader


def own_rows(accelerator: Any, inputs: Any) -> int:
    """Return how many samples a batch was made of, which may have fewer rows, without those that fill it up."""
    state, sampler = accelerator.gradient_state, _own_samples(accelerator)
    if sampler is None:
        return max(0, min(_kept(accelerator, inputs), samples_in(inputs)))
    is_last = state.end_of_dataloader and state.remainder > 0
    left = state.remainder - accelerator.process_index * sampler.rows if is_last else sampler.rows
    return max(0, min(left, sampler.rows))


def of_own_rows(accelerator: Any, evaluate: Callable[[Any, int], tuple[Any, ...]], inputs: Any) -> tuple[Any, ...]:
    """Evaluate a batch without the rows that fill up the last batch of all replicas, which its loss is not of.

    Args:
        accelerator: That of the trainer.
        evaluate: Returns of a batch, and of how many samples of its own it was made, its loss, and outputs with an
            entry for each row.
        inputs: The batch. If it has nothing but rows that fill it up, it is evaluated whole, and counts for nothing.

    Returns:
        What ``evaluate`` has returned; outputs have again as many rows as those of the other replicas.
    """
    kept, size, own = _kept(accelerator, inputs), samples_in(inputs), own_rows(accelerator, inputs)
    if not 0 < kept < size or not isinstance(inputs, Mapping):
        return evaluate(inputs, own)
    loss, *outputs = evaluate(chosen_rows(inputs, size, 1, [0], kept), own)

    def filled(value: Any) -> Any:
        has_rows = isinstance(value, torch.Tensor) and value.dim() and len(value) == kept
        return torch.cat([value, value[-1:].expand(size - kept, *value.shape[1:])]) if has_rows else value

    return (loss, *(tree_map(filled, one) for one in outputs))


def _kept(accelerator: Any, inputs: Any) -> int:
    """Return how many samples of a batch of this replica do not fill it up."""
    state, size = accelerator.gradient_state, samples_in(inputs)
    if accelerator.num_processes == 1 or not state.end_of_dataloader or state.remainder <= 0:
        return size
    if _own_samples(accelerator) is not None:
        return size if own_rows(accelerator, inputs) else 0
    kept: int = state.remainder - accelerator.process_index * size
    return kept


def _own_samples(accelerator: Any) -> OwnSamples | None:
    sampler = getattr(accelerator.gradient_state.active_dataloader, "batch_sampler", None)
    return sampler if isinstance(sampler, OwnSamples) else None
