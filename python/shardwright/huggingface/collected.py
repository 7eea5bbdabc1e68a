"""Functions of accelerate by which modules of other libraries collect what their processes have."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import accelerate.utils

from shardwright.accelerate.gathering import gathered, gathered_objects, padded, reduced
from shardwright.job.runtime import find_runtime


def _gather_object(value: Any) -> list[Any]:
    return [one for of_rank in gathered_objects(value) for one in of_rank]


def _reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    return reduced(tensor, reduction, scale)


def _pad(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    return padded(tensor, dim, pad_index, pad_first)


def _broadcast_object_list(objects: list[Any], from_process: int = 0) -> list[Any]:
    objects[:] = gathered_objects(objects)[from_process]
    return objects


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
