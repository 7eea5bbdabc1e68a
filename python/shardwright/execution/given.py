"""Contents of the containers and objects passed to a module, to detect whether it changed them."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import nn

from shardwright.frames.remote import RemoteTensor
from shardwright.values.arrays import is_array
from shardwright.values.state import attributes_of

Snapshots = list[tuple[Any, list[Any]]]

#: Values of these types have no contents to compare.
_PLAIN = frozenset((torch.Tensor, nn.Parameter, RemoteTensor, type(None), bool, int, float, str))


def contents_of(value: Any) -> list[Any] | None:
    """Return the contents of a mutable value; None for any other value."""
    if type(value) in _PLAIN:
        return None
    if isinstance(value, list):
        return list(value)
    if isinstance(value, dict):
        return [part for item in value.items() for part in item]
    if isinstance(value, set):
        return sorted(value, key=id)
    if isinstance(value, torch.Tensor | type):
        return None
    if is_array(value):
        return [value.tobytes()]
    if hasattr(value, "__dict__") or hasattr(type(value), "__slots__"):
        kind = type(value)
        return [
            part
            for item in attributes_of(value).items()
            if not isinstance(getattr(kind, item[0], None), cached_property)  # its first use is not a change
            for part in item
        ]
    return None


def snapshots(tree: Any) -> Snapshots:
    """Return all mutable values in a tree, with their contents."""
    found: Snapshots = []
    stack = [tree]
    while stack:
        value = stack.pop()
        if isinstance(value, tuple):
            stack.extend(value)
            continue
        contents = contents_of(value)
        if contents is not None:
            found.append((value, contents))
            stack.extend(contents)
    return found


def first_changed(before: Snapshots) -> Any:
    """Return the first value whose contents have changed; None if there is none."""
    for container, contents in before:
        now = contents_of(container)
        assert now is not None, "it was a container before"
        if len(now) != len(contents) or not all(map(_is_same, contents, now)):
            return container
    return None


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) is bytes and one == other)
