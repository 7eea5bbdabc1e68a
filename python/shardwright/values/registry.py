"""Which types cross ranks besides the built-in ones, and how they are taken apart and built again."""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

from shardwright.errors import ConfigError, UnsupportedValueError

T = TypeVar("T")
ToFields = Callable[[Any], Any]
FromFields = Callable[[Any], Any]


class _Decoders(dict[str, FromFields]):
    """Decoders by name; types that need no registration are found among the modules already imported."""

    def __missing__(self, name: str) -> FromFields:
        module, _, qualified = name.partition(":")
        found: Any = sys.modules.get(module)
        for part in qualified.split("."):
            found = getattr(found, part, None)
        if isinstance(found, type):
            entry = automatic_entry(found)
            if entry is not None and entry[0] == name:
                return self[name]
        raise UnsupportedValueError(
            f"a value of the registered type {name!r} arrived, but this rank has no such registration; call "
            "smp.register_type on every rank before the first step"
        )


class ValueRegistry:
    """The registered types of this process.

    Attributes:
        encoders: By type, its registered name and the function to its fields.
        decoders: By registered name, the function from fields.
    """

    def __init__(self) -> None:
        """Start with the standard library's containers."""
        self.encoders: dict[type, tuple[str, ToFields]] = {}
        self.decoders: dict[str, FromFields] = _Decoders()
        self.add(OrderedDict, "collections:OrderedDict", lambda value: list(value.items()), OrderedDict)

    def add(self, kind: type, name: str, to_fields: ToFields, from_fields: FromFields) -> None:
        """Make a type known under a name."""
        self.encoders[kind] = (name, to_fields)
        self.decoders[name] = from_fields

    def fallback(self, kind: type) -> tuple[str, ToFields] | None:
        """The entry of a type that was not registered; None when it may not cross ranks."""
        return automatic_entry(kind)


registry = ValueRegistry()


def _type_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def automatic_entry(kind: type) -> tuple[str, ToFields] | None:
    """Register a type that needs no registration: outputs of ``transformers``, and named tuples."""
    name = _type_name(kind)
    outputs = sys.modules.get("transformers.utils.generic")
    if outputs is not None and issubclass(kind, outputs.ModelOutput):
        registry.add(kind, name, lambda value: dict(value.items()), lambda fields: kind(**fields))
    elif issubclass(kind, tuple) and hasattr(kind, "_fields") and hasattr(kind, "_make"):
        registry.add(kind, name, tuple, kind._make)
    else:
        return None
    return registry.encoders[kind]


def register_type(
    kind: type[T],
    name: str | None = None,
    to_fields: Callable[[T], Any] | None = None,
    from_fields: Callable[[Any], T] | None = None,
) -> type[T]:
    """Let values of a type cross ranks, as arguments and results of modules; call it alike on every rank.

    Args:
        kind: A dataclass, a subclass of ``dict``, or any class with both functions given. Usable as a decorator.
        name: The name it travels under; its module and qualified name by default.
        to_fields: Takes a value apart into values that can cross ranks.
        from_fields: Builds the value from what ``to_fields`` returned.

    Returns:
        ``kind`` itself.

    Raises:
        ConfigError: The type is neither a dataclass nor a dict, and the functions are missing.
    """
    if (to_fields is None) != (from_fields is None):
        raise ConfigError(f"register_type({kind.__qualname__}): give both to_fields and from_fields, or neither")
    if to_fields is None or from_fields is None:
        if dataclasses.is_dataclass(kind):
            names = [field.name for field in dataclasses.fields(kind)]
            to_fields = lambda value: {field: getattr(value, field) for field in names}  # noqa: E731
            from_fields = lambda fields: _build_dataclass(kind, fields)  # noqa: E731
        elif issubclass(kind, dict):
            to_fields = lambda value: list(value.items())  # type: ignore[attr-defined]  # noqa: E731
            from_fields = kind
        else:
            raise ConfigError(
                f"register_type({kind.__qualname__}): not a dataclass or a dict; give to_fields and from_fields"
            )
    registry.add(kind, name or _type_name(kind), to_fields, from_fields)
    return kind


def _build_dataclass(kind: type[T], fields: dict[str, Any]) -> T:
    """Build without ``__init__``, which may compute or check what the sender has done already."""
    value = object.__new__(kind)
    for name, field in fields.items():
        object.__setattr__(value, name, field)
    return value
