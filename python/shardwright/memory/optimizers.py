"""How many bytes an optimizer keeps for its parameters, before it has made them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from shardwright.half_precision import gradient_dtype
from shardwright.half_precision.cast import HALF
from shardwright.optimizer.offloading import StreamedState
from shardwright.quantized import num_bytes
from shardwright.sharded_data_parallel.parameters import shard_of

#: Tensors of the size of a parameter that an optimizer keeps for it, by the options of its group.
_COPIES: Mapping[type[torch.optim.Optimizer], Callable[[Mapping[str, Any]], int]] = {
    torch.optim.SGD: lambda group: int(group["momentum"] != 0),
    torch.optim.Adam: lambda group: 2 + int(group["amsgrad"]),
    torch.optim.Adamax: lambda _: 2,
    torch.optim.NAdam: lambda _: 2,
    torch.optim.RAdam: lambda _: 2,
    torch.optim.Adagrad: lambda _: 1,
    torch.optim.Adadelta: lambda _: 2,
    torch.optim.RMSprop: lambda group: 1 + int(group["momentum"] > 0) + int(group["centered"]),
    torch.optim.Rprop: lambda _: 2,
    torch.optim.ASGD: lambda _: 1,
}


def expected_bytes(optimizers: Iterable[Any], slices: Mapping[int, int]) -> int | None:
    """Return the bytes that optimizers will keep for the parameters of this rank, and for slices that others hold.

    Args:
        optimizers: The optimizers.
        slices: How many slices of a parameter are counted, by its ``id``; 1 if it is not there.

    Returns:
        The bytes, or None if one of them is of an unknown class.
    """
    total = 0
    for optimizer in optimizers:
        kinds = (kind for kind in type(optimizer).__mro__ if kind in _COPIES or kind is torch.optim.AdamW)
        kind = next(kinds, None)
        copies = _COPIES.get(torch.optim.Adam if kind is torch.optim.AdamW else kind) if kind is not None else None
        if copies is None:
            return None
        for group in optimizer.param_groups:
            for one in group["params"]:
                if one.requires_grad:
                    updated = _master_bytes(one) if _has_master(optimizer, one) else nbytes(one)
                    total += copies(group) * slices.get(id(one), 1) * updated
    return total


def expected_master_bytes(optimizers: Iterable[Any], slices: Mapping[int, int]) -> int:
    """Return the bytes of the master weights that optimizers will keep; arguments as of :func:`expected_bytes`."""
    return sum(
        slices.get(id(one), 1) * _master_bytes(one)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for one in group["params"]
        if one.requires_grad and _has_master(optimizer, one)
    )


def _has_master(optimizer: Any, parameter: torch.Tensor) -> bool:
    return bool(optimizer.has_masters) and parameter.dtype in HALF


def _master_bytes(parameter: torch.Tensor) -> int:
    return shard_of(parameter).numel() * torch.float32.itemsize


def expected_gradient_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """Return the bytes that the gradients of parameters will have.

    Args:
        parameters: The parameters, each counted once.
    """
    trained = {id(one): one for one in parameters if one.requires_grad}
    return sum(shard_of(one).numel() * gradient_dtype(one).itemsize for one in trained.values())


def streamed_bytes(optimizers: Iterable[Any]) -> int:
    """Return the bytes of state, and of master weights, that optimizers have on a disk.

    Args:
        optimizers: The optimizers.
    """
    return sum(optimizer.streamed_bytes() for optimizer in optimizers if isinstance(optimizer, StreamedState))


def state_bytes(optimizers: Iterable[Any]) -> int:
    """Return the bytes of the tensors in the state of optimizers, and of their master weights, wherever they are.

    Args:
        optimizers: The optimizers.
    """
    optimizers = list(optimizers)
    values = (value for optimizer in optimizers for state in optimizer.state.values() for value in state.values())
    masters: int = sum(optimizer.master_bytes for optimizer in optimizers if optimizer.has_masters)
    return masters + distinct_bytes(value for value in values if isinstance(value, torch.Tensor))


def distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors, each object counted once."""
    return sum(nbytes(tensor) for tensor in {id(tensor): tensor for tensor in tensors}.values())


def nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements; of a sparse tensor, of its values and indices; of a sharded, here."""
    tensor = shard_of(tensor)
    if tensor.layout is torch.sparse_coo:
        return nbytes(tensor._values()) + nbytes(tensor._indices())
    return num_bytes(tensor)
