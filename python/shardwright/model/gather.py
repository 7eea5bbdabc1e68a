"""Collecting a value from every rank of a pipeline, of TP_GROUP, or of both."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from shardwright.job.objects import gathered
from shardwright.job.ranks import CommGroup
from shardwright.job.runtime import find_runtime


def gather_over(group: CommGroup, value: Any, operation: str, *, to_first: bool = False) -> list[Any]:
    """The `value` of every rank of a group, in the order of ranks; called by all of them.

    Args:
        group: PP_GROUP, TP_GROUP, or MP_GROUP for all ranks that have a part of the model.
        value: This rank's.
        operation: What the ranks have to call together, for errors.
        to_first: Whether only the group's first rank needs the values; the others get an empty list.
    """
    runtime = find_runtime()
    if runtime is None or len(runtime.place.topology.group(group.value, runtime.place.rank)) == 1:
        return [value]
    return gathered(operation, value, group, to_first=to_first)


def on_cpu(value: Any) -> Any:
    """The same value with its tensors detached and in host memory."""
    return tree_map(lambda item: item.detach().cpu() if isinstance(item, torch.Tensor) else item, value)
