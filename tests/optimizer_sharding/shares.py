"""What a rank has of gradients, where optimizer state is sharded."""

from __future__ import annotations

from typing import Any

import shardwright as smp
import torch
from shardwright.data_parallel.shards import ParameterShards
from shardwright.job.runtime import current_runtime


def whole_gradients(model: Any) -> dict[str, torch.Tensor | None]:
    """The gradients of this rank's parameters that have owners, by name, put together from all replicas.

    Raises:
        AssertionError: A rank has a gradient of elements that another one owns, or an owner lacks one.
    """
    place, shards = current_runtime().place, current_runtime()[ParameterShards]
    divided = {name: one for name, one in model.local_named_parameters() if shards.of(one) is not None}
    mine: dict[str, torch.Tensor] = {}
    for name, parameter in divided.items():
        if parameter.grad is None:
            continue
        own = shards.own(parameter, place.rank)
        assert own is not None, f"rank {place.rank} has a gradient of {name}, of which it owns nothing"
        mine[name] = own.of(parameter.grad).clone()
        own.of(parameter.grad).zero_()
        assert not parameter.grad.any(), f"rank {place.rank} has a gradient of {name} outside its part"
        own.of(parameter.grad).copy_(mine[name])
    of_rank = dict(zip(place.dp_ranks, smp.allgather(mine, smp.DP_GROUP), strict=True))
    whole: dict[str, torch.Tensor | None] = {}
    for name, parameter in divided.items():
        parts = [of_rank[piece.owner].get(name) for piece in shards.of(parameter) or ()]
        given = [part for part in parts if part is not None]
        assert len(given) in (0, len(parts)), f"some owners of {name} have a gradient, and others have none"
        whole[name] = torch.cat(given).view(parameter.shape) if given else None
    return whole


def owned_elements(model: Any) -> int | None:
    """How many elements of parameters with owners this rank owns; None if none of its parameters has owners."""
    place, shards = current_runtime().place, current_runtime()[ParameterShards]
    divided = [parameter for parameter in model.local_parameters() if shards.of(parameter) is not None]
    if not divided:
        return None
    own = (shards.own(parameter, place.rank) for parameter in divided)
    return sum(piece.stop - piece.start for piece in own if piece is not None)
