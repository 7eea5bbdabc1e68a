"""Caches and their layers taken apart, and built again on another rank."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from shardwright.caches.handles import CacheHandle, LayerState, contents_of
from shardwright.caches.kinds import cache_class, is_cache
from shardwright.errors import FrameError

_PLAIN = (type(None), bool, int, float, str)


class ClassName(NamedTuple):
    """A class of layers that a cache makes more of."""

    name: str


def class_name(kind: type) -> str:
    """Return what a class is called in messages."""
    return f"{kind.__module__}:{kind.__qualname__}"


def _class(name: str, bases: tuple[str, ...]) -> type[Any]:
    """Return the class of a name that another rank has sent, without running code."""
    module, _, qualified = name.partition(":")
    found: Any = vars(sys.modules[module]).get(qualified) if module in sys.modules else None
    caches = sys.modules.get("transformers.cache_utils")
    allowed = () if caches is None else tuple(vars(caches)[base] for base in bases if base in vars(caches))
    if not isinstance(found, type) or not issubclass(found, allowed):
        raise FrameError(
            f"another rank sent a key/value cache made of {name!r}, which this rank does not know: import the module "
            "that defines it on every rank"
        )
    return found


def layer_class(name: str) -> type[Any]:
    """Return the class of a layer by its name."""
    return _class(name, ("CacheLayerMixin", "LinearAttentionCacheLayerMixin"))


def layers_of(cache: Any) -> list[Any]:
    """Return the layers of a cache; none of one that consists of caches."""
    layers: list[Any] = vars(cache).get("layers", [])
    return layers


def plain_attributes(cache: Any) -> dict[str, Any]:
    """Return the attributes of a cache besides layers and the caches that it consists of."""
    return {name: value for name, value in vars(cache).items() if name != "layers" and not is_cache(value)}


def named(value: Any) -> Any:
    """Return an attribute of a cache as it is sent.

    Raises:
        FrameError: It cannot be.
    """
    if isinstance(value, type):
        return ClassName(class_name(value))
    if type(value) is dict and all(type(item) in _PLAIN for pair in value.items() for item in pair):
        return dict(value)
    if type(value) not in _PLAIN:
        raise FrameError(
            f"a key/value cache with a {type(value).__name__} is given to a module on another rank: pass a "
            "DynamicCache or StaticCache that is not offloaded"
        )
    return value


def value_of(value: Any) -> Any:
    """Return an attribute of a cache from what was sent of it."""
    if type(value) is ClassName:
        return layer_class(value.name)
    return dict(value) if type(value) is dict else value


def contents(layer: Any, *, detached: bool) -> dict[str, Any]:
    """Return all that a layer holds."""
    return {name: contents_of(value, detached=detached) for name, value in vars(layer).items()}


def new_cache(handle: CacheHandle) -> Any:
    """Return a cache without layers."""
    kind = cache_class()
    cache = object.__new__(_class(handle.kind, () if kind is None else ("Cache",)))
    if not any(isinstance(value, CacheHandle) for value in handle.attributes.values()):
        cache.layers = []
    return cache


def fill(layers: list[Any], state: LayerState) -> None:
    """Put a layer with its contents in its place."""
    layer = object.__new__(layer_class(state.kind))
    vars(layer).update({name: _own(value) for name, value in state.state.items()})
    own = next(tensors_of(state.state), None)
    if "device" in state.state and own is not None:
        layer.device = own.device
    while len(layers) <= state.number:
        layers.append(object.__new__(layer_class(state.kind)))
    layers[state.number] = layer


def _own(value: Any) -> Any:
    """Return what a layer has received in memory of its own, to which it may write in place."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _own(item) for key, item in value.items()}
    return [_own(item) for item in value] if isinstance(value, list) else value


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in an attribute of a layer."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, list):
        for item in value:
            yield from tensors_of(item)
