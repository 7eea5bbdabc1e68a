"""``smp.register_type``: send objects of a script's own classes."""

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
    """Register a class whose objects can be sent between ranks.

    Objects can then be in arguments and results of modules, in results of steps, and in :func:`send`. Call this in the
    same way on every rank, for example as a decorator, before the first object is sent. Subclasses must be registered
    separately. The receiver gets a new object; tensors in it keep their gradients.

    Args:
        cls: The class. Without the functions, an object is decomposed into its attributes, and a ``dict`` also into its
            entries, and recreated without calling ``__init__``. ``__getstate__`` and ``__setstate__`` are used if the
            class defines them. Enum members keep their identity.
        name: The name of the class in messages, the same on every rank; by default its module and qualified name.
        flatten: Converts an object to a value that can be sent.
        unflatten: Creates the object from the result of ``flatten``.

    Returns:
        ``cls``.

    Raises:
        ConfigError: Only one function is given, or none for a class that needs them; or the name belongs to another
            class, or the class has another name.
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
