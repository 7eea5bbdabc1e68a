"""What is in containers and in Python objects, and how to put it back."""

from __future__ import annotations

import logging
import types
from collections import deque
from typing import Any

import torch
from torch import nn

_CONTAINERS = (list, dict, set, deque)
#: What `nn.Module` itself keeps in a module; the library's own interception writes some of them.
INTERNAL = frozenset(nn.Module().__dict__) | {"forward", "_compiled_call_impl", "__dict__", "__class__"}
_NO_STATE = (nn.Module, torch.Tensor, type, types.ModuleType, types.FunctionType, types.MethodType, logging.Logger)
#: Objects of these packages are not the model's own.
FOREIGN = frozenset(
    {"builtins", "torch", "shardwright", "logging", "threading", "numpy", "functools", "weakref", "collections", "re"}
)


def contents_of(value: Any) -> Any:
    """The container itself, the dict of an object's attributes, or None for what has no state to share."""
    if type(value) in _CONTAINERS or isinstance(value, dict):
        return value
    if isinstance(value, _NO_STATE) or type(value).__module__.partition(".")[0] in FOREIGN:
        return None
    attributes = getattr(value, "__dict__", None)
    return attributes if type(attributes) is dict else None


def copied(contents: Any) -> Any:
    """The same items in a container of its own."""
    return dict(items_of(contents)) if isinstance(contents, dict) else type(contents)(contents)


def items_of(contents: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """The items as they are; a subclass may make values when it is asked for them."""
    return list(dict.items(contents))


def restore_container(container: Any, contents: Any) -> None:
    """Give a list, dict, set or deque its contents back, without touching one that has not changed."""
    if isinstance(container, dict):
        restore_dict(container, contents)
    elif isinstance(container, set):
        if container != contents:
            container.clear()
            container.update(contents)
    elif len(container) != len(contents) or any(a is not b for a, b in zip(container, contents, strict=True)):
        container.clear()
        container.extend(contents)


def restore_dict(found: dict[Any, Any], wanted: dict[Any, Any]) -> None:
    """Give a dict its items back, in their order."""
    if [key for key, _ in items_of(found)] != list(wanted):
        found.clear()
        found.update(wanted)
        return
    for key, value in items_of(found):
        if value is not wanted[key]:
            found[key] = wanted[key]
