"""``smp.register_type``: a script's own classes cross ranks."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from shardwright.errors import ConfigError
from shardwright.values.registry import registry, type_name
from shardwright.values.state import functions_of

T = TypeVar("T")

_BUILT_IN: tuple[type, ...] = (
    *(bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, slice),
    *(types.NoneType, types.EllipsisType),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)


def register_type(
    cls: type[T],
    *,
    name: str | None = None,
    flatten: Callable[[T], Any] | None = None,
    unflatten: Callable[[Any], T] | None = None,
) -> type[T]:
    """Let objects of a class cross ranks: in arguments and results of modules, in results of steps, in :func:`send`.

    Call it alike on every rank, for example as a decorator, before the first object is sent. Objects of exactly this
    class cross; a subclass is registered by itself. Each arrives as a new object; tensors in it keep their gradients.

    Args:
        cls: The class. Without the functions its objects are taken apart into their attributes, a ``dict`` into its
            entries as well, and built again without ``__init__``; a class's own ``__getstate__`` and ``__setstate__``
            are used. Members of an ``Enum`` arrive as themselves.
        name: The name it travels under, the same on every rank; module and qualified name by default.
        flatten: Takes an object apart into a value that can cross ranks.
        unflatten: Builds the object from what ``flatten`` returned.

    Returns:
        ``cls`` itself.

    Raises:
        ConfigError: Only one function is given, or none for a class that needs them; the name belongs to another class,
            or the class has another name.
    """
    if (flatten is None) != (unflatten is None):
        raise ConfigError(f"register_type({cls.__qualname__}): give both flatten and unflatten, or neither")
    if cls in _BUILT_IN or issubclass(cls, torch.Tensor):
        raise ConfigError(
            f"register_type({cls.__qualname__}): built-in types and tensors cross ranks as they are, and tensors of "
            "other classes not at all"
        )
    if flatten is None or unflatten is None:
        if issubclass(cls, torch.nn.Module):
            raise ConfigError(
                f"register_type({cls.__qualname__}): a module is not a value; send its state_dict(), or give flatten "
                "and unflatten"
            )
        flatten, unflatten = functions_of(cls)
    registry.add(cls, name or type_name(cls), flatten, unflatten)
    return cls
