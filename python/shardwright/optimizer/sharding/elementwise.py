"""Optimizers that update each element of a parameter by itself, so that ranks may have parts of a parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

#: How many tensors of a parameter's size the state has, by the options of a group.
_STATE_TENSORS: dict[type[Optimizer], Callable[[Mapping[str, Any]], int]] = {
    torch.optim.SGD: lambda group: int(group["momentum"] != 0),
    torch.optim.Adam: lambda group: 2 + bool(group["amsgrad"]),
    torch.optim.AdamW: lambda group: 2 + bool(group["amsgrad"]),
    torch.optim.Adagrad: lambda group: 1,
    torch.optim.RMSprop: lambda group: 1 + (group["momentum"] > 0) + bool(group["centered"]),
    torch.optim.Adadelta: lambda group: 2,
    torch.optim.Adamax: lambda group: 2,
    torch.optim.NAdam: lambda group: 2,
    torch.optim.RAdam: lambda group: 2,
    torch.optim.ASGD: lambda group: 1,
    torch.optim.Rprop: lambda group: 2,
}


def original_class(optimizer: Optimizer) -> type[Optimizer]:
    """Return the class of an optimizer before ``smp.DistributedOptimizer`` wrapped it.

    Args:
        optimizer: The distributed optimizer.
    """
    original: type[Optimizer] = type(optimizer).__bases__[-1]
    return original


def state_tensors(kind: type[Optimizer], group: Mapping[str, Any]) -> int | None:
    """Return how many tensors of a parameter's size the state has.

    Args:
        kind: The optimizer's class. A subclass of a known one may do anything.
        group: The options of the parameter's group.

    Returns:
        The number; None for an optimizer that is not known to be element-wise.
    """
    found = _STATE_TENSORS.get(kind)
    return None if found is None else found(group)


def is_elementwise(kind: type[Optimizer]) -> bool:
    """Return whether an optimizer's class is known to update each element by itself.

    This library's own subclasses of such classes only choose their arguments.
    """
    return kind in _STATE_TENSORS or (
        kind.__module__.startswith("shardwright.") and any(base in _STATE_TENSORS for base in kind.__mro__)
    )


def changes_without_gradient(kind: type[Optimizer]) -> bool:
    """Return whether an optimizer may change parameters that have no gradient; those of PyTorch do not."""
    return not kind.__module__.startswith("torch.optim.")
