"""In an evaluation each sample is given to one replica, once, and never one that fills the last batch up: drawn."""

from __future__ import annotations

import random

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from shardwright.huggingface.last_batch import OwnSamples, of_own_samples
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler


def shards(samples: int, size: int, replicas: int, *, split: bool, drop_last: bool) -> list[list[list[int]]]:
    """The batches of each replica."""
    every = []
    for replica in range(replicas):
        batches = BatchSampler(SequentialSampler(range(samples)), size * (replicas if split else 1), drop_last)
        sampler = BatchSamplerShard(batches, replicas, replica, split)
        loader = of_own_samples(DataLoader(torch.arange(samples), batch_sampler=sampler))
        assert isinstance(loader.batch_sampler, OwnSamples) == (replicas > 1)
        every.append([list(batch) for batch in sampler])
        assert len(every[-1]) == len(sampler)
    return every


@pytest.mark.parametrize("seed", range(150))
def test_each_sample_is_given_once(seed: int) -> None:
    drawn = random.Random(seed)
    replicas, size, samples = drawn.randint(1, 4), drawn.randint(1, 4), drawn.randint(1, 40)
    split, drop_last = drawn.random() < 0.5, drawn.random() < 0.3
    every = shards(samples, size, replicas, split=split, drop_last=drop_last)
    whole = size * replicas
    given = samples - samples % whole if drop_last else samples
    assert {len(batches) for batches in every} == {-(-given // whole)}
    kept = []
    for number in range(len(every[0])):
        together = [index for batches in every for index in batches[number]]
        assert all(batches[number] for batches in every)
        left = given - number * whole
        kept += together[: min(left, whole)]  # as accelerator.gather_for_metrics does
        if left >= whole:
            assert {len(batches[number]) for batches in every} == {size}
        elif replicas > 1:  # what a replica has of its own, if any
            own = [max(0, min(size, left - replica * size)) for replica in range(replicas)]
            assert all(not rows or len(batches[number]) == rows for rows, batches in zip(own, every, strict=True))
    assert kept == list(range(given))
