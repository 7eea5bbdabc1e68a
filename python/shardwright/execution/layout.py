"""Memory layouts of tensors that are not dense; tensors are sent dense."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.frames.remote import is_remote
from shardwright.values.tensors import is_dense


def layouts_of(tensors: list[torch.Tensor]) -> dict[str, Any]:
    """Return the layouts of the tensors that are not dense, as keyword arguments of ``ArgumentNotes``.

    The layout decides whether ``reshape`` or ``contiguous`` returns a copy, and therefore where a later write goes.

    Returns:
        ``strides``: the index and strides of each such tensor, for :func:`restride`; ``overlapping``: the indices of
        those in which several elements share a memory location; ``relaid``: the indices of those that arrive in another
        layout, because their elements overlap in other ways than by expansion. Nothing if all are dense.
    """
    layouts: dict[str, Any] = {}
    for index, tensor in enumerate(tensors):
        if is_remote(tensor) or is_dense(tensor):  # remote ones are dense, or they would be here
            continue
        expanded = any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        overlapping = _overlaps([part for part in _parts(tensor) if part[0] > 0])
        if expanded or overlapping:
            layouts.setdefault("overlapping", []).append(index)
        if overlapping:
            layouts.setdefault("relaid", []).append(index)
        else:
            layouts.setdefault("strides", []).append((index, list(tensor.stride())))
    return layouts


def restride(tensor: torch.Tensor, strides: list[int]) -> torch.Tensor:
    """Return a received tensor in its sender's layout, with gaps and expanded dimensions."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    with torch.no_grad():
        memory = tensor.new_empty(span if tensor.numel() else 0)
        # Not a view of `memory`: views of a received tensor must have that tensor as their base.
        laid = tensor.new_empty(0).set_(memory.untyped_storage(), 0, tensor.shape, strides)
        once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)
        laid[once].copy_(tensor[once])
    return laid


def _parts(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return strides and sizes of the dimensions with more than one element, sorted by stride."""
    return sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


def _overlaps(parts: list[tuple[int, int]]) -> bool:
    reach = 0
    for stride, size in parts:
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False
