"""Gathers a value from every rank of a pipeline, of TP_GROUP, or of both."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from shardwright.job.objects import gathered
from shardwright.job.ranks import CommGroup
from shardwright.job.runtime import find_runtime


def gather_over(group: CommGroup, value: Any, operation: str, *, to_first: bool = False) -> list[Any]:
    """Return the `value` of every rank of a group, in rank order. All ranks of the group must call this function.

    Args:
        group: PP_GROUP, TP_GROUP, or MP_GROUP for all ranks that hold a part of the model.
        value: The value of this rank.
        operation: The name of the operation that the ranks run together, for error messages.
        to_first: Whether only the first rank of the group needs the values. The others then get an empty list.
    """
    runtime = find_runtime()
    if runtime is None or len(runtime.place.topology.group(group.value, runtime.place.rank)) == 1:
        return [value]
    return gathered(operation, value, group, to_first=to_first)


def on_cpu(value: Any) -> Any:
    """Return the value with its tensors detached and in host memory."""
    return tree_map(lambda item: item.detach().cpu() if isinstance(item, torch.Tensor) else item, value)
