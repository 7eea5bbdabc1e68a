"""How many bytes an optimizer keeps for its parameters, before it has made them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

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
            trained = (parameter for parameter in group["params"] if parameter.requires_grad)
            total += copies(group) * sum(slices.get(id(one), 1) * nbytes(one) for one in trained)
    return total


def state_bytes(optimizers: Iterable[Any]) -> int:
    """Return the bytes of the tensors in the state of optimizers.

    Args:
        optimizers: The optimizers.
    """
    values = (value for optimizer in optimizers for state in optimizer.state.values() for value in state.values())
    return distinct_bytes(value for value in values if isinstance(value, torch.Tensor))


def distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors, each object counted once."""
    return sum(nbytes(tensor) for tensor in {id(tensor): tensor for tensor in tensors}.values())


def nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements; of a sparse tensor, of its values and indices; of a sharded, here."""
    tensor = shard_of(tensor)
    if tensor.layout is torch.sparse_coo:
        return nbytes(tensor._values()) + nbytes(tensor._indices())
    return tensor.numel() * tensor.element_size()
