"""Shards in the places of sharded parameters, for updates of optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch.optim import Optimizer

from shardwright.job.runtime import Runtime
from shardwright.sharded_data_parallel.parameters import ShardedParameters, shard_of


@contextlib.contextmanager
def in_place_of_shards(runtime: Runtime | None, optimizer: Optimizer) -> Iterator[None]:
    """Put plain parameters in the memory of this rank's shards, with their gradients, into groups and state."""
    if runtime is None or not (registry := runtime[ShardedParameters]):
        yield
        return
    sharded = [one for group in optimizer.param_groups for one in group["params"] if registry.is_sharded(one)]
    locals_ = {id(one): registry.local(one) for one in sharded}
    for parameter in sharded:
        locals_[id(parameter)].grad = None if parameter.grad is None else shard_of(parameter.grad)
    before = {id(locals_[id(parameter)]): parameter for parameter in sharded}
    try:
        _exchange(optimizer, locals_)
        yield
    finally:
        _exchange(optimizer, before)
        for local in locals_.values():
            local.grad = None


def _exchange(optimizer: Optimizer, tensors: Mapping[int, Any]) -> None:
    for group in optimizer.param_groups:
        group["params"][:] = [tensors.get(id(one), one) for one in group["params"]]
    entries = list(optimizer.state.items())
    optimizer.state.clear()
    for key, entry in entries:
        optimizer.state[tensors.get(id(key), key)] = entry
