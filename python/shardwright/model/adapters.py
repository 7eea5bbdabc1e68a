"""Adapters that are added to a divided model, deleted from it, or merged: each rank does so with what it runs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwright.job.ranks import PP_GROUP
from shardwright.model.gather import gather_over, on_cpu
from shardwright.model.sentinel import Sentinel, is_sentinel, release
from shardwright.partition.tree import join_path

if TYPE_CHECKING:
    from shardwright.model.ownership import Ownership
    from shardwright.model.placement import Placement


class AdaptersOfModel:
    """Where the adapters of a model are, for methods of ``peft`` that change all of them."""

    def __init__(self, placement: Placement) -> None:
        """Look at a model, which may not be divided yet."""
        self._placement = weakref.ref(placement)

    def _ownership(self) -> Ownership | None:
        placement = self._placement()
        return None if placement is None else placement.ownership

    @property
    def is_divided(self) -> bool:
        """Whether the model is divided by now."""
        return self._ownership() is not None

    def spanning(self, part: nn.Module) -> str | None:
        """Return the name of a part if ranks divide it, on all ranks; None if one rank has all of it."""
        ownership = self._ownership()
        path = None if ownership is None else ownership.path_of(part)
        if ownership is None or path is None:
            return None
        owners = {ownership.owner_of(join_path(path, name) if name else path) for name, _ in part.named_modules()}
        return path if len(owners) > 1 else None

    def is_here(self, part: nn.Module) -> bool:
        """Return whether this rank runs a part."""
        ownership = self._ownership()
        path = None if ownership is None else ownership.path_of(part)
        return ownership is None or path is None or ownership.owner_of(path) == ownership.pp_rank

    def gathered(self, operation: str, value: Any) -> list[Any]:
        """Return the value of each rank of the pipeline, all of which call this."""
        return gather_over(PP_GROUP, on_cpu(value), operation)

    def is_elsewhere(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor stands for one of another rank."""
        return is_sentinel(tensor)

    def changed(self, parts: list[nn.Module]) -> None:
        """Take over what parts of the model have got, or have not any more: other ranks' adapters are released.

        All ranks call this. Values are those of the first data-parallel rank, as at the beginning.
        """
        placement, ownership = self._placement(), self._ownership()
        if placement is None or ownership is None:
            return
        made: list[torch.Tensor] = []
        for part in parts:
            path = ownership.path_of(part)
            if path is not None:
                made += ownership.take_over(path, part)
        ownership.forget_checks()
        if made:
            placement.replicas.equalise(made)


def unknown_tensors(part: nn.Module, path: str, known: Any) -> Iterator[tuple[str, dict[str, Any], str, torch.Tensor]]:
    """Yield the parameters and buffers in a part that the model did not have when it was divided.

    Args:
        part: The part.
        path: Its path.
        known: The names that the model had.

    Yields:
        The full name, the table that holds the tensor, its name there, and the tensor.
    """
    for name, module in part.named_modules():
        inside = join_path(path, name) if name else path
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for own, tensor in table.items():
                full = join_path(inside, own)
                if tensor is not None and full not in known and not is_sentinel(tensor):
                    yield full, table, own, tensor


def release_to(owner: int, name: str, table: dict[str, Any], own: str, tensor: torch.Tensor) -> Sentinel:
    """Put a placeholder where a tensor of another rank is."""
    is_parameter = isinstance(tensor, nn.Parameter)
    with torch.inference_mode(False):
        sentinel = Sentinel(tensor, name=name, owner=owner, is_parameter=is_parameter)
        table[own] = sentinel
        if is_parameter:
            release(tensor, sentinel)
    return sentinel
