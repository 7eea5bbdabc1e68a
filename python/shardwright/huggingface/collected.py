"""Functions of accelerate by which modules of other libraries collect what their processes have."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import accelerate.utils
from accelerate.utils import recursively_apply

from shardwright.accelerate.gathering import gathered, gathered_objects, padded, reduced
from shardwright.job.objects import allgather
from shardwright.job.ranks import WORLD, data_group, group_ranks, rank
from shardwright.job.runtime import current_runtime, find_runtime


def _gather_object(value: Any) -> list[Any]:
    return [one for of_rank in gathered_objects(value) for one in of_rank]


def _reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    return reduced(tensor, reduction, scale)


def _pad(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    return padded(tensor, dim, pad_index, pad_first)


def _of_process(value: Any, number: int) -> Any:
    """Return what a process has: the first rank of a pipeline for all of its ranks, which may have made another one."""
    is_first = current_runtime().place.pp_rank == 0
    every = allgather((_place(), value) if is_first else None, WORLD)
    return next(one for index, one in (told for told in every if told is not None) if index == number)


def _place() -> int:
    return group_ranks(data_group()).index(rank())


def _broadcast_object_list(objects: list[Any], from_process: int = 0) -> list[Any]:
    objects[:] = _of_process(objects, from_process)
    return objects


def _broadcast(tensor: Any, from_process: int = 0) -> Any:
    return recursively_apply(lambda one: _of_process(one, from_process).to(one.device), tensor)


def _over_ranks(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    plain = getattr(accelerate.utils, name)

    @functools.wraps(plain)
    def collected(*args: Any, **keywords: Any) -> Any:
        return plain(*args, **keywords) if find_runtime() is None else own(*args, **keywords)

    return collected


#: For accelerate a rank is alone, so that its functions would return what this rank has.
_FUNCTIONS = {
    name: (getattr(accelerate.utils, name), _over_ranks(name, own))
    for name, own in {
        "gather": gathered,
        "gather_object": _gather_object,
        "reduce": _reduce,
        "pad_across_processes": _pad,
        "broadcast": _broadcast,
        "broadcast_object_list": _broadcast_object_list,
    }.items()
}


def collect_over_ranks(module: str) -> None:
    """Let the functions of accelerate that a module has imported collect from ranks with different samples, in jobs."""
    names = vars(sys.modules[module]) if module in sys.modules else {}
    for name, value in list(names.items()):
        for plain, own in _FUNCTIONS.values():
            if value is plain:
                names[name] = own
