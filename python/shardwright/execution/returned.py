"""Tensors that modules both keep and return; the receiver may read one after another microbatch has changed it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shardwright.contents import reached
from shardwright.execution.children import value_of
from shardwright.execution.kept import Attribute, version_of
from shardwright.execution.task import RunningTask
from shardwright.frames.remote import is_remote
from shardwright.frames.watch import memory_id


def note_returned(task: RunningTask, name: str, places: Iterable[Attribute], result: Any) -> None:
    """Record the tensors in a module's result that share memory with its state, with their versions.

    Args:
        task: The task that called the module. It may itself have changed the state in this call.
        name: The name of the module.
        places: The attributes that hold its state.
        result: The result of the module.
    """
    task.returned = [(earlier, tensor, version_of(tensor)) for earlier, tensor, _ in task.returned]
    held = {memory_id(tensor) for tensor in _tensors_of(places)}
    if held:
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and _has_memory(leaf)]
        task.returned += [(name, tensor, version_of(tensor)) for tensor in tensors if memory_id(tensor) in held]


def changed_since_returned(task: RunningTask) -> str | None:
    """Return the name of a module whose returned tensors were changed since by another task; None if there is none."""
    return next((name for name, tensor, version in task.returned if version_of(tensor) != version), None)


def _tensors_of(places: Iterable[Attribute]) -> Iterator[torch.Tensor]:
    for place in places:
        value = value_of(*place)
        for part in [value] if isinstance(value, nn.Parameter) else reached(value):
            if isinstance(part, torch.Tensor) and _has_memory(part):
                yield part


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not is_remote(tensor)
