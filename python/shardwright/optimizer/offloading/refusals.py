"""Optimizers whose steps cannot go over their parameters in parts."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from shardwright.errors import ConfigError
from shardwright.optimizer.sharding.elementwise import is_elementwise

#: Those of ``torch.optim`` that update each parameter by itself, by factors or norms of it. Not every version has all.
_BY_PARAMETER = ("Adafactor", "Muon", "SparseAdam")


def may_be_streamed(kind: type[Optimizer]) -> bool:
    """Return whether an optimizer's class is known to update each parameter by itself.

    Args:
        kind: The optimizer's class. A subclass of a known one may do anything.
    """
    return is_elementwise(kind) or any(getattr(torch.optim, name, None) is kind for name in _BY_PARAMETER)


def refuse_streaming(optimizer: Optimizer, kind: type[Optimizer]) -> None:
    """Check that the step of an optimizer can go over its parameters in parts.

    Args:
        optimizer: The optimizer.
        kind: Its class, before it was distributed.

    Raises:
        ConfigError: It cannot.
    """
    if not may_be_streamed(kind):
        raise ConfigError(
            f'{kind.__name__} is not known to update each parameter by itself, and with "offload_optimizer": "disk" a '
            "step goes over the parameters in parts: norms or dot products over several of them would be those of a "
            'part. Use an optimizer of torch.optim such as AdamW, or "offload_optimizer": False'
        )
    refuse_differentiable(optimizer)


def refuse_differentiable(optimizer: Optimizer) -> None:
    """Check that no group of an optimizer wants gradients through its step.

    Args:
        optimizer: The optimizer.

    Raises:
        ConfigError: One does.
    """
    if any(group.get("differentiable", False) for group in optimizer.param_groups):
        raise ConfigError(
            f"{type(optimizer).__name__} with differentiable=True: gradients through a step would need the state "
            'before it, which "offload_optimizer": "disk" overwrites; use differentiable=False'
        )
