"""Manual placement of modules: ``smp.partition(i)`` and ``smp.set_partition(module, i)``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from torch import nn

from shardwright.creation import CreationMark
from shardwright.errors import PartitionError
from shardwright.job.runtime import find_runtime
from shardwright.job.wrapped import WrappedModels
from shardwright.partition.tree import ModelTree

# Stored in the module itself, so that the placement is copied and deleted with it.
_CREATED_IN = "_smp_created_in_partition"
_SET_TO = "_smp_set_to_partition"

_CREATED: CreationMark[int] = CreationMark(_CREATED_IN)


@dataclass(frozen=True, kw_only=True)
class ManualPlacement:
    """A module that the script has placed, with all its submodules that are not placed themselves."""

    path: str
    pp_rank: int


@contextlib.contextmanager
def partition(i: int) -> Iterator[None]:
    """Place the modules created inside on pipeline rank `i`, from 0. The innermost context wins.

    With ``auto_partition`` on, contexts are ignored: modules placed by `set_partition` keep their place, and the rest
    is placed by cost. With it off, a module without a placement goes to the rank of its parent, and finally to
    ``default_partition``.

    Raises:
        PartitionError: There is no such rank.
    """
    _check_place(i, "smp.partition")
    with _CREATED.within(i):
        yield


def set_partition(module: nn.Module, i: int) -> None:
    """Place `module`, and all its submodules without a placement of their own, on pipeline rank `i`, from 0.

    The placement applies with ``auto_partition`` on or off. Call this function identically on every rank, before the
    first step. The module may be the ``smp.DistributedModel`` itself.

    Raises:
        PartitionError: There is no such rank, or the model is already divided.
    """
    _check_place(i, "smp.set_partition")
    runtime = find_runtime()
    for model in runtime[WrappedModels].alive if runtime is not None and runtime.place.pp_size > 1 else ():
        if module is model:
            module = cast(nn.Module, model.module)
        if model.placement.partitioned and any(part is module for part in model.module.modules()):
            raise PartitionError("smp.set_partition came too late: the model was divided in its first step")
    module.__dict__[_SET_TO] = i


def manual_placements(tree: ModelTree, *, auto: bool) -> list[ManualPlacement]:
    """Return the modules that the script has placed; with `auto`, contexts do not count."""
    placed = []
    for entry in tree.modules:
        place = entry.module.__dict__.get(_SET_TO)
        if place is None and not auto:
            place = entry.module.__dict__.get(_CREATED_IN)
        if place is not None:
            placed.append(ManualPlacement(path=entry.path, pp_rank=place))
    return placed


def _check_place(i: object, function: str) -> None:
    runtime = find_runtime()
    if isinstance(i, bool) or not isinstance(i, int) or i < 0:
        raise PartitionError(f"{function} was given {i!r}; allowed: the pp_ranks, from 0")
    if runtime is not None and i >= runtime.place.pp_size:
        raise PartitionError(
            f"{function} was given {i}, but pipeline_parallel_degree is {runtime.place.pp_size}; allowed: 0 to "
            f"{runtime.place.pp_size - 1}"
        )
