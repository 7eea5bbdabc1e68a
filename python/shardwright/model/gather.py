"""Collecting a value from every rank of a pipeline, of TP_GROUP, or of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from shardwright.job.objects import gathered
from shardwright.job.ranks import CommGroup
from shardwright.job.runtime import find_runtime

Gather = Callable[[Any], list[Any]]
"""Gives the value of every rank of a group, in the order of ranks; all of them call it."""


_PARTS = "a gather of the model's parts"


def over_pipeline(value: Any, operation: str = _PARTS) -> list[Any]:
    """Every pipeline rank's `value`, in the order of pp_ranks; called by all ranks of the pipeline."""
    return _over("PP_GROUP", value, operation)


def over_tensor_ranks(value: Any, operation: str = _PARTS) -> list[Any]:
    """Every tensor-parallel rank's `value`, in the order of tp_ranks; called by all ranks of TP_GROUP."""
    return _over("TP_GROUP", value, operation)


def over_model(value: Any, operation: str = _PARTS) -> list[Any]:
    """The `value` of every rank that has a part of the model; called by all ranks of MP_GROUP."""
    return _over("MP_GROUP", value, operation)


def to_first_rank(value: Any, operation: str = _PARTS) -> list[Any]:
    """Every pipeline rank's `value` on pp_rank 0, and an empty list on the others; called by all of them."""
    return _over("PP_GROUP", value, operation, to_first=True)


def to_first_tensor_rank(value: Any, operation: str = _PARTS) -> list[Any]:
    """Every tensor-parallel rank's `value` on tp_rank 0, and an empty list on the others; called by all of them."""
    return _over("TP_GROUP", value, operation, to_first=True)


def _over(group: str, value: Any, operation: str, *, to_first: bool = False) -> list[Any]:
    runtime = find_runtime()
    if runtime is None or len(runtime.place.topology.group(group, runtime.place.rank)) == 1:
        return [value]
    return gathered(operation, value, CommGroup(group), to_first=to_first)


def on_cpu(value: Any) -> Any:
    """The same value with its tensors detached and in host memory."""
    return tree_map(lambda item: item.detach().cpu() if isinstance(item, torch.Tensor) else item, value)
