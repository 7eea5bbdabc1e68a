"""Materializing delayed tensors in place."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from shardwright.delayed.operations import DelayedMemory, evaluate
from shardwright.delayed.tensor import DelayedTensor, become


def is_delayed(tensor: object) -> bool:
    """Return whether a tensor has no values yet."""
    return type(tensor) is DelayedTensor


def has_delayed(module: nn.Module) -> bool:
    """Return whether a module has parameters without values."""
    return any(is_delayed(parameter) for parameter in module.parameters())


def materialise(tensors: Iterable[torch.Tensor], device: torch.device | None = None) -> None:
    """Materialize delayed tensors, on a device or where they are made; they remain the same objects.

    Other tensors are ignored. Tensors that share memory share it afterwards. Host memory for one of them at a time is
    needed beyond the result. If autograd holds a view of one of them, :class:`ShardwrightError` is raised.
    """
    groups: dict[DelayedMemory, list[DelayedTensor]] = {}
    for tensor in tensors:
        if isinstance(tensor, DelayedTensor) and not any(tensor is one for one in groups.get(tensor.value.memory, ())):
            groups.setdefault(tensor.value.memory, []).append(tensor)
    # The first step may be an evaluation, but training follows.
    with torch.inference_mode(False):
        while groups:
            group = groups.pop(next(iter(groups)))
            values = evaluate([tensor.value for tensor in group])
            if len(group) == 1 and not _is_whole(values[0]):
                values = [values[0].clone()]  # a part of something larger, which nothing else needs
            for tensor, value in zip(group, values, strict=True):
                become(tensor, value if device is None else value.to(device))


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size()


def forget(tensor: torch.Tensor) -> None:
    """Discard the operations of a delayed parameter, which becomes empty but remains the same object."""
    if isinstance(tensor, DelayedTensor):
        become(tensor, torch.empty(0, dtype=tensor.dtype, device=tensor.device))
