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

    Error messages name the `operation`. With `to_first`, only the first rank gets the values; the others get an empty
    list.
    """
    runtime = find_runtime()
    if runtime is None or len(runtime.place.topology.group(group.value, runtime.place.rank)) == 1:
        return [value]
    return gathered(operation, value, group, to_first=to_first)


def on_cpu(value: Any) -> Any:
    """Return the value with its tensors detached and in host memory."""
    return tree_map(lambda item: item.detach().cpu() if isinstance(item, torch.Tensor) else item, value)
