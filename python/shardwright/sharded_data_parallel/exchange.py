"""Shards in the places of sharded parameters, for updates of optimizers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from shardwright.groups import put_back_gradient, standing_one_for_one
from shardwright.job.runtime import Runtime
from shardwright.sharded_data_parallel.parameters import ShardedParameters, shard_of


@contextlib.contextmanager
def in_place_of_shards(runtime: Runtime | None, optimizer: Optimizer) -> Iterator[None]:
    """Put plain parameters in the memory of this rank's shards, with their gradients, into groups and state.

    What gradients they have at the end of the block, the sharded parameters have.
    """
    if runtime is None or not (registry := runtime[ShardedParameters]):
        yield
        return
    sharded = [one for group in optimizer.param_groups for one in group["params"] if registry.is_sharded(one)]
    locals_ = {id(one): registry.local(one) for one in sharded}
    given = [None if one.grad is None else shard_of(one.grad) for one in sharded]
    for parameter, gradient in zip(sharded, given, strict=True):
        locals_[id(parameter)].grad = gradient
    before = {id(locals_[id(parameter)]): parameter for parameter in sharded}
    try:
        with standing_one_for_one(optimizer, locals_, before):
            yield
        for parameter, gradient in zip(sharded, given, strict=True):
            left = locals_[id(parameter)].grad
            put_back_gradient(parameter, gradient, left, functools.partial(_write, parameter))
    finally:
        for local in locals_.values():
            local.grad = None


def _write(parameter: Any, shard: torch.Tensor) -> None:
    """Let a sharded parameter have this gradient, of which this is the rank's shard."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    shard_of(parameter.grad).copy_(shard)
