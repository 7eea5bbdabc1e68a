"""Collecting a value from every rank of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

Gather = Callable[[Any], list[Any]]
"""Gives every pipeline rank's value, in the order of pp_ranks; all of them call it."""


def over_pipeline(value: Any) -> list[Any]:
    """Every pipeline rank's `value`, in the order of pp_ranks; called by all ranks of the pipeline."""
    # Imported late: the runtime needs the model.
    from shardwright.objects import allgather
    from shardwright.ranks import PP_GROUP
    from shardwright.runtime import find_runtime

    runtime = find_runtime()
    if runtime is None or runtime.pp_size == 1:
        return [value]
    return allgather(value, PP_GROUP)


def to_first_rank(value: Any) -> list[Any]:
    """Every pipeline rank's `value` on pp_rank 0, and an empty list on the others; called by all of them."""
    # Imported late: the runtime needs the model.
    from shardwright.objects import receive_on, send_on
    from shardwright.runtime import find_runtime

    runtime = find_runtime()
    if runtime is None or runtime.pp_size == 1:
        return [value]
    first, *others = runtime.pp_ranks
    if runtime.rank != first:
        send_on(runtime, first, "gather to the first rank", value)
        return []
    return [value, *(receive_on(runtime, rank, "gather to the first rank") for rank in others)]


def on_cpu(value: Any) -> Any:
    """The same value with its tensors detached and in host memory."""
    return tree_map(lambda item: item.detach().cpu() if isinstance(item, torch.Tensor) else item, value)
