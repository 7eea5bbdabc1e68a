"""What ranks send each other of a cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from shardwright.errors import FrameError

CacheId = tuple[int, int]
"""The rank on which a cache was created, and its number there."""

#: Values that describe a layer and are sent as they are.
_PLAIN = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device))


class Shape(NamedTuple):
    """A tensor that stays where it is."""

    size: list[int]
    dtype: torch.dtype


class Number(NamedTuple):
    """A tensor of a single number, such as a length."""

    value: float
    dtype: torch.dtype


class LayerState(NamedTuple):
    """A layer of a cache.

    Attributes:
        number: Its number.
        kind: Its class.
        state: Its attributes; tensors only if they are sent with it.
    """

    number: int
    kind: str
    state: dict[str, Any]


class Operation(NamedTuple):
    """What was done with a layer whose contents are elsewhere."""

    number: int
    name: str
    arguments: list[Any]


@dataclass
class CacheHandle:
    """A cache in a call.

    Attributes:
        id: Which one; None if it crosses by value.
        kind: Its class.
        attributes: Its attributes besides layers; caches in it are handles, and classes names.
        outlines: Layers whose contents are elsewhere.
        moved: Layers whose contents come with it, and are the receiver's from now on.
        operations: What was done with layers that the receiver has, in order.
        released: Caches that are no longer used.
    """

    id: CacheId | None
    kind: str
    attributes: dict[str, Any]
    outlines: list[LayerState]
    moved: list[LayerState]
    operations: list[Operation] = field(default_factory=list)
    released: list[CacheId] = field(default_factory=list)


class CacheChanges(NamedTuple):
    """What a call has changed of a cache.

    Attributes:
        id: Which one.
        attributes: Its attributes besides layers; None if they are as they were.
        outlines: The layers that have changed.
    """

    id: CacheId
    attributes: dict[str, Any] | None
    outlines: list[LayerState]


@dataclass
class CacheAnswer:
    """What comes with the answer to a call that caches were given to.

    Attributes:
        changes: What it has changed of them.
        collected: What ``transformers`` has collected; None if nothing was to be.
    """

    changes: list[CacheChanges]
    collected: Any


def outline_of(value: Any) -> Any:
    """Return what other ranks know of an attribute of a layer.

    Raises:
        FrameError: It is of a type that cannot be described.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        if value.dim() == 0 and not value.is_meta:
            return Number(value.item(), value.dtype)
        return Shape(list(value.shape), value.dtype)
    if type(value) is dict:
        return {key: outline_of(item) for key, item in value.items()}
    if type(value) is list:
        return [outline_of(item) for item in value]
    raise FrameError(
        f"a key/value cache has a layer that holds a {type(value).__name__}, and is given to a module on another rank: "
        "caches whose layers hold tensors, numbers, lists and dicts can be (DynamicCache, StaticCache), and neither "
        "quantized ones nor those of other libraries"
    )


def contents_of(value: Any, *, detached: bool) -> Any:
    """Return an attribute of a layer as it is sent with its tensors; raises as :func:`outline_of`."""
    if isinstance(value, torch.Tensor):
        return value.detach() if detached else value
    if type(value) is dict:
        return {key: contents_of(item, detached=detached) for key, item in value.items()}
    if type(value) is list:
        return [contents_of(item, detached=detached) for item in value]
    return outline_of(value)


def from_outline(value: Any) -> Any:
    """Return an attribute of a layer as ranks have it that do not have its contents."""
    if type(value) is Shape:
        return torch.empty(value.size, dtype=value.dtype, device="meta")
    if type(value) is Number:
        return torch.tensor(value.value, dtype=value.dtype)
    if type(value) is dict:
        return {key: from_outline(item) for key, item in value.items()}
    if type(value) is list:
        return [from_outline(item) for item in value]
    return value
