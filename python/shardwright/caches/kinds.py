"""Caches among the values that a call takes and returns."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

#: Types of most arguments, which hold nothing.
_LEAVES = frozenset((torch.Tensor, type(None), bool, int, float, str))


def cache_class() -> type[Any] | None:
    """Return the class of caches; None if ``transformers`` has not been imported."""
    caches = sys.modules.get("transformers.cache_utils")
    return None if caches is None else caches.Cache


def is_cache(value: object) -> bool:
    """Return whether a value is a cache of ``transformers``."""
    kind = cache_class()
    return kind is not None and isinstance(value, kind)


def holds_cache(values: Any) -> bool:
    """Return whether a key/value cache is among arguments or results."""
    kind = cache_class()
    return kind is not None and _holds(values, kind)


def _holds(value: Any, kind: type) -> bool:
    if type(value) in _LEAVES:
        return False
    if isinstance(value, Mapping):
        return any(_holds(item, kind) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_holds(item, kind) for item in value)
    return isinstance(value, kind)


def replaced_in(value: Any, kind: type | tuple[type, ...], replace: Callable[[Any], Any]) -> Any:
    """Return a value in which all values of a class are replaced, in containers of Python and outputs too."""
    if type(value) in _LEAVES:
        return value
    if isinstance(value, kind):
        return replace(value)
    if isinstance(value, Mapping):
        if not _holds(value, kind):  # type: ignore[arg-type]
            return value
        items = {name: replaced_in(item, kind, replace) for name, item in value.items()}
        return items if type(value) is dict else type(value)(**items)
    if isinstance(value, list | tuple):
        if not _holds(value, kind):  # type: ignore[arg-type]
            return value
        items_of = [replaced_in(item, kind, replace) for item in value]
        return type(value)(*items_of) if hasattr(value, "_fields") else type(value)(items_of)
    return value


def copied(call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], Any]:
    """Return a call with these arguments that leaves the caches among them as they are, however often it is made."""
    kind = cache_class()
    if kind is None or not _holds((args, dict(kwargs)), kind):
        return lambda: call(*args, **kwargs)

    def run() -> Any:
        own_args, own_kwargs = replaced_in((args, dict(kwargs)), kind, copy.deepcopy)
        return call(*own_args, **own_kwargs)

    return run
