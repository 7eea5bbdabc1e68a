"""Pack tensors into one flat byte buffer, so that one collective moves any number of tensors of any dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")
Shape = tuple[int, ...]
#: A collective that runs while its caller computes: a call, once, waits for its end and returns its result.
Pending = Callable[[], T]

#: Half precision is summed in single precision and rounded once.
_SUMMED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def num_bytes(shapes: Sequence[Shape], dtypes: Sequence[torch.dtype]) -> int:
    """Return the number of bytes that contiguous tensors of these shapes and dtypes take together."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Pack the elements of tensors, of any shapes, strides and dtypes, one after another into a buffer of uint8.

    It may share memory with a single contiguous tensor.
    """
    first = tensors[0].detach()
    if len(tensors) == 1 and first.is_contiguous() and not first.is_conj() and not first.is_neg():
        # With one element or none, it is contiguous with any strides, such as those of an expanded gradient.
        return first.as_strided((first.numel(),), (1,)).view(torch.uint8)
    lengths = [tensor.numel() * tensor.dtype.itemsize for tensor in tensors]
    buffer = torch.empty(sum(lengths), dtype=torch.uint8, device=first.device)
    for tensor, place in zip(tensors, torch.split(buffer, lengths), strict=True):
        if place.storage_offset() % tensor.dtype.itemsize == 0:
            place.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        else:  # after one of a smaller dtype
            place.copy_(
                torch.empty(tensor.shape, dtype=tensor.dtype, device=place.device)
                .copy_(tensor.detach())
                .view(-1)
                .view(torch.uint8)
            )
    return buffer


def unpack(buffer: torch.Tensor, shapes: Sequence[Shape], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """Return the tensors in a buffer from :func:`pack`; they share its memory if their alignment allows."""
    lengths = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
    tensors = []
    for place, shape, dtype in zip(torch.split(buffer, lengths), shapes, dtypes, strict=True):
        aligned = place if place.storage_offset() % dtype.itemsize == 0 else place.clone()
        tensors.append(aligned.view(dtype).view(shape))
    return tensors


def resized(shape: Sequence[int], dim: int, size: int) -> Shape:
    """Return a shape with another size in one dim, which is not negative."""
    return (*shape[:dim], size, *shape[dim + 1 :])


def sum_in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum tensors of one shape and dtype from first to last; an element's sum does not depend on its position."""
    dtype = parts[0].dtype
    total = parts[0].to(_SUMMED_IN.get(dtype, dtype), copy=True)
    for part in parts[1:]:
        total += part
    return total.to(dtype)
