"""What scripts ask of a parameter and of a message."""

from __future__ import annotations

from typing import Any

import shardwright
import torch
from shardwright.job.runtime import current_runtime
from shardwright.model.models import Models

__all__ = ["get_distribution_axis", "rmsg"]


def get_distribution_axis(parameter: torch.Tensor) -> int | None:
    """Return along which axis tensor parallelism divides a parameter or buffer.

    Args:
        parameter: One of a ``smp.DistributedModel``, on this rank.

    Returns:
        The axis, counted from 0. None if every tensor-parallel rank has the whole tensor, if only one of them has it,
        and with ``tensor_parallel_degree`` 1.
    """
    runtime = current_runtime()
    for placement in runtime[Models].placements:
        sharding = placement.sharded.by_id().get(id(parameter)) if placement.is_sharded else None
        if sharding is not None:
            return sharding.dim
    return None


def rmsg(message: Any) -> str:
    """Return a message with this rank before it: ``[3] message``, as lines of several ranks are told apart."""
    return f"[{shardwright.rank()}] {message}"
