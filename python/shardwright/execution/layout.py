"""How tensors lie in memory, where that is not the dense layout in which they travel."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from shardwright.frames.remote import is_remote
from shardwright.values.tensors import is_dense


@dataclass(frozen=True, slots=True)
class Layouts:
    """How those of some tensors lie that are not dense.

    Attributes:
        strides: By index, for :func:`restride`.
        overlapping: The indices of those with several elements at one place in memory.
        relaid: Of those the ones that arrive in another layout, because elements overlap in other ways than by
            expansion.
    """

    strides: list[tuple[int, list[int]]] = field(default_factory=list)
    overlapping: list[int] = field(default_factory=list)
    relaid: list[int] = field(default_factory=list)


#: Those of tensors that are all dense.
_DENSE = Layouts()


def layouts_of(tensors: list[torch.Tensor]) -> Layouts:
    """How tensors lie that are not dense.

    Whether ``reshape`` or ``contiguous`` gives a copy depends on it, and with that where a later write goes.
    """
    if all(is_remote(tensor) or is_dense(tensor) for tensor in tensors):  # remote ones came so, or would be here
        return _DENSE
    layouts = Layouts()
    for index, tensor in enumerate(tensors):
        if is_remote(tensor) or is_dense(tensor):
            continue
        expanded = any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        overlapping = _overlaps([part for part in _parts(tensor) if part[0] > 0])
        if expanded or overlapping:
            layouts.overlapping.append(index)
        if overlapping:
            layouts.relaid.append(index)
        else:
            layouts.strides.append((index, list(tensor.stride())))
    return layouts


def restride(tensor: torch.Tensor, strides: list[int]) -> torch.Tensor:
    """A received tensor in its sender's layout, with gaps and expanded dimensions."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    with torch.no_grad():
        memory = tensor.new_empty(span if tensor.numel() else 0)
        # Not a view of that memory's tensor: views of received tensors must find the tensor itself as their base.
        laid = tensor.new_empty(0).set_(memory.untyped_storage(), 0, tensor.shape, strides)
        once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)
        laid[once].copy_(tensor[once])
    return laid


def _parts(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Strides and sizes of the dimensions that have more than one element, by stride."""
    return sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


def _overlaps(parts: list[tuple[int, int]]) -> bool:
    reach = 0
    for stride, size in parts:
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False
