"""Gathers a value from every rank of a pipeline, of TP_GROUP, or of both; or what went wrong on one."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map

from shardwright.errors import RemoteError
from shardwright.failure_text import FailureText
from shardwright.job.objects import gathered
from shardwright.job.ranks import CommGroup
from shardwright.job.runtime import find_runtime

T = TypeVar("T")


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


def on_every_rank(group: CommGroup, operation: str, work: Callable[[], T]) -> T:
    """Return what `work` gives on this rank, if it fails on no rank of a group. All its ranks must call this function.

    Raises:
        RemoteError: It failed on another rank.
    """
    try:
        result = work()
    except Exception as error:
        runtime = find_runtime()
        rank = 0 if runtime is None else runtime.place.rank
        gather_over(group, (rank, socket.gethostname(), *FailureText.of(error)), operation)
        raise
    for failure in gather_over(group, None, operation):
        if failure is not None:
            rank, host, kind, message, traceback = failure
            raise RemoteError(rank, host, None, None, None, kind, message, traceback)
    return result
