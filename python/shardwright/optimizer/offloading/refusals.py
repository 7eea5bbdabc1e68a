"""Options of optimizers whose steps cannot go over their parameters in parts."""

from __future__ import annotations

from torch.optim import Optimizer

from shardwright.errors import ConfigError


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
            'before it, which "offload_optimizer" overwrites; use differentiable=False'
        )
