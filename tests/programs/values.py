"""What modules of random programs give one another beside tensors, and how the tensors in it are found."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque
from collections.abc import Iterable
from enum import Enum
from typing import Any, NamedTuple

import numpy
import torch
from torch.nn.utils.rnn import PackedSequence


class Pair(NamedTuple):
    """A named tuple among arguments and results."""

    first: Any
    second: Any


class Side(Enum):
    """A member of an enumeration among them."""

    LEFT = 1
    RIGHT = 2


@dataclasses.dataclass
class Sample:
    """An ordinary dataclass among them."""

    tensor: torch.Tensor
    side: Side
    extra: Any = None
    names: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    """A dataclass that cannot be changed."""

    tensors: tuple[torch.Tensor, ...]
    scale: Any


#: Shapes of values that hold some tensors; the first one is always among them.
STRUCTURES = ("dataclass", "frozen", "named", "ordered", "numpy", "sparse", "complex", "top", "range", "packed")


def structured(kind: str, tensors: list[torch.Tensor]) -> Any:
    """A value that holds tensors."""
    first, last = tensors[0], tensors[-1]
    if kind == "dataclass":
        return Sample(first, Side.RIGHT, {"last": last}, ["a", "b"])
    if kind == "frozen":
        return Frozen((first, last), numpy.float64(0.5))
    if kind == "named":
        return Pair(Sample(first, Side.LEFT), [Pair(last, Side.LEFT), None])
    if kind == "ordered":
        return OrderedDict(z=first, a=(last, 2.5, "text"))
    if kind == "numpy":
        return {"tensor": first, "array": last.detach().numpy().copy(), "scale": numpy.float32(2.0)}
    if kind == "sparse":
        return [first, _matrix(last).to_sparse().coalesce()]
    if kind == "complex":
        return torch.complex(first, first * 0.5)
    if kind == "top":
        return first.reshape(-1).topk(min(3, first.numel())) if first.numel() else first
    if kind == "range":
        return first, range(1, 7, 2), slice(0, 2), torch.Size((2, 3)), torch.float64, ...
    lengths = torch.tensor([min(2, len(_matrix(first)))])
    return torch.nn.utils.rnn.pack_padded_sequence(_matrix(first).unsqueeze(0), lengths, batch_first=True)


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.reshape(1, 1)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors of a nested value, all real, dense and of floating-point numbers; others are made such."""
    if isinstance(tree, torch.Tensor):
        return [_real(tensor) for tensor in ([tree.real, tree.imag] if tree.is_complex() else [tree])]
    if isinstance(tree, numpy.ndarray):
        return [torch.from_numpy(numpy.array(tree, numpy.float64))]
    if isinstance(tree, PackedSequence):
        return [tree.data]
    if dataclasses.is_dataclass(tree):
        return tensors_of(getattr(tree, field.name) for field in dataclasses.fields(tree))
    if isinstance(tree, dict):
        return tensors_of(tree.values())
    return tensors_of(tree) if isinstance(tree, list | tuple | deque) else []


def _real(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor if tensor.dtype is torch.float64 else tensor.double()


def tensors_of(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors of several values."""
    return [tensor for value in values for tensor in tensors_in(value)]
