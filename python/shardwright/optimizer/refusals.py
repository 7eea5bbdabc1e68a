"""Optimizers that a job does not allow."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from shardwright.errors import ConfigError
from shardwright.job.runtime import Runtime
from shardwright.model.updates import Updates
from shardwright.optimizer.offloading import StateStorage, refuse_differentiable
from shardwright.optimizer.reach import ask
from shardwright.optimizer.replaced_step import refuse_replaced_step


def refuse_optimizer(optimizer: Optimizer, runtime: Runtime, dtype: torch.dtype | None) -> None:
    """Check that the job updates parameters in a way that an optimizer allows; ``dtype`` is that of half precision.

    Raises:
        ConfigError: It does not.
    """
    runtime[Updates].refuse_replaced(optimizer)
    if dtype is not None and isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "torch.optim.LBFGS evaluates the model during its update, which master weights of fp16 and bf16 do not "
            "allow; use another optimizer"
        )
    if runtime.find(StateStorage) is not None:
        refuse_differentiable(optimizer)
    refuse_replaced_step(optimizer, runtime, has_masters=dtype is not None)
    ask(optimizer, runtime, type(optimizer))
