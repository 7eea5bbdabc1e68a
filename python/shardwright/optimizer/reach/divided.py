"""How the parameters of an optimizer are made of the weights that one process has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from shardwright.half_precision import model_parameter
from shardwright.job.runtime import Runtime
from shardwright.model.models import Models
from shardwright.sharded_data_parallel.parameters import ShardedParameters
from shardwright.tensor_parallel.sharding import Origin, Rows, Sharding

#: Marks state that is whole, between steps, where its shape is that of this rank's part of the parameter.
_WHOLE = "_shardwright_whole"


class Divided(NamedTuple):
    """How a parameter of this rank is made of the weights that one process has.

    Attributes:
        sharding: How it is divided over tensor-parallel ranks, or over those that shard parameters.
        origins: What it was made of.
    """

    sharding: Sharding
    origins: tuple[Origin, ...]


def divided_parameters(runtime: Runtime, groups: Iterable[Mapping[str, Any]]) -> dict[int, Divided]:
    """Return how parameters in the groups are made of whole weights, by ``id``, for those that are not such themselves.

    Args:
        runtime: The rank.
        groups: The groups, with parameters of the model or their master weights.
    """
    known: dict[int, Divided] = {}
    for placement in runtime[Models].placements:
        if placement.is_sharded:
            origins = placement.sharded.made_of()
            for key, sharding in placement.sharded.by_id().items():
                made_of = tuple(origins.get(key, ()))
                if all(one.is_all for one in made_of):
                    made_of = ()
                if sharding.dim is not None or made_of:
                    known[key] = Divided(sharding, made_of)
    if runtime.place.shards_parameters:
        sizes = runtime[ShardedParameters].sizes()
        known |= {key: Divided(Rows(dim=0, size=size), ()) for key, size in sizes.items()}
    parameters = (parameter for group in groups for parameter in group["params"])
    keys = {id(parameter): id(model_parameter(parameter)) for parameter in parameters}
    return {key: known[of_model] for key, of_model in keys.items() if of_model in known}


def kept_whole(value: Any, shape: torch.Size) -> Any:
    """Return state that every rank has whole so that it is not taken for a part of it.

    Args:
        value: What a step has left, such as a statistic of columns.
        shape: The shape of this rank's part of the parameter.
    """
    is_like_a_part = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == shape
    return {_WHOLE: value} if is_like_a_part else value


def whole_value(value: Any) -> Any:
    """Return what :func:`kept_whole` was given.

    Args:
        value: What it has returned.
    """
    return value[_WHOLE] if isinstance(value, dict) and value.keys() == {_WHOLE} else value
