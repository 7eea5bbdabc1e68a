"""Optimizers that a job does not allow."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from shardwright.errors import ConfigError
from shardwright.job.runtime import Runtime
from shardwright.optimizer.offloading import StateStorage, refuse_differentiable
from shardwright.optimizer.reach import ask


def refuse_optimizer(optimizer: Optimizer, runtime: Runtime, dtype: torch.dtype | None) -> None:
    """Check that the job updates parameters in a way that an optimizer allows; ``dtype`` is that of half precision.

    Raises:
        ConfigError: It does not.
    """
    place, name = runtime.place, type(optimizer).__name__
    shards = place.shards_optimizer_state
    if shards and getattr(optimizer, "steps_on_all_ranks", False):
        raise ConfigError(
            f"{name} exchanges norms of all parameters, of which each rank updates a share; use "
            "shard_optimizer_state=False or another optimizer"
        )
    if runtime.find(StateStorage) is not None:
        refuse_differentiable(optimizer)
    if (
        not isinstance(optimizer, torch.optim.LBFGS)
        or place.shards_parameters
        or runtime.find(StateStorage) is not None
    ):
        ask(optimizer, runtime, type(optimizer))
    if not isinstance(optimizer, torch.optim.LBFGS):
        return
    needs = "torch.optim.LBFGS needs dot products over all parameters of the model"
    if place.pp_size > 1:
        raise ConfigError(
            f"{needs}, which several pipeline ranks hold; use pipeline_parallel_degree 1 or another optimizer"
        )
    if shards:
        raise ConfigError(
            f"{needs}, of which each rank updates a share; use shard_optimizer_state=False or another optimizer"
        )
    if dtype is not None:
        raise ConfigError(
            "torch.optim.LBFGS evaluates the model during its update, which master weights of fp16 and bf16 do not "
            "allow; use another optimizer"
        )
