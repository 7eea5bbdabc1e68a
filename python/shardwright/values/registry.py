"""The types besides built-in ones that can be sent between ranks: some always, others after registration."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from shardwright.errors import ConfigError, UnsupportedValueError
from shardwright.values.known import functions_without_registration

Flatten = Callable[[Any], Any]
Unflatten = Callable[[Any], Any]


class UnknownNameError(UnsupportedValueError):
    """A value was received with a type name that is not known on this rank."""


class _Decoders(dict[str, Unflatten]):
    """Functions by type name; types that need no registration are looked up in the modules already imported."""

    def __init__(self, owner: ValueRegistry) -> None:
        super().__init__()
        self._owner = owner

    def __missing__(self, name: str) -> Unflatten:
        found = _type_named(name)
        if found is not None:
            entry = self._owner.fallback(found)
            if entry is not None and entry[0] == name:
                return self[name]
        raise UnknownNameError(
            f"a value of the type registered as {name!r}, which this rank has not registered; call "
            f"smp.register_type for that class, under that name, on every rank before it is sent"
        )


class ValueRegistry:
    """The types of this process whose values are sent as the results of their ``flatten`` functions.

    Attributes:
        encoders: By type, the name that is sent and the function that takes a value apart.
        decoders: By name, the function that builds a value.
    """

    def __init__(self) -> None:
        """Create a registry that contains ``OrderedDict``."""
        self.encoders: dict[type, tuple[str, Flatten]] = {}
        self.decoders: dict[str, Unflatten] = _Decoders(self)
        self._kinds: dict[str, type] = {}
        self.add(OrderedDict, "collections:OrderedDict", lambda value: list(value.items()), OrderedDict)

    def add(self, kind: type, name: str, flatten: Flatten, unflatten: Unflatten) -> None:
        """Register a type under a name.

        Raises:
            ConfigError: The name belongs to another type, or the type has another name.
        """
        owner = self._kinds.get(name, kind)
        if owner is not kind and type_name(owner) != type_name(kind):
            raise ConfigError(
                f"{type_name(kind)} cannot be registered as {name!r}: {type_name(owner)} has that name; give another "
                "one as register_type(..., name=...)"
            )
        known = self.encoders.get(kind)
        if known is not None and known[0] != name:
            raise ConfigError(f"{type_name(kind)} cannot be registered as {name!r}: it is registered as {known[0]!r}")
        # The class was defined again: values of the previous one would arrive as values of the new one.
        self.encoders.pop(owner, None)
        self._kinds[name] = kind
        self.encoders[kind] = (name, flatten)
        self.decoders[name] = unflatten

    def fallback(self, kind: type) -> tuple[str, Flatten] | None:
        """Return the entry of a type that may not be registered; None if its values cannot be sent."""
        if kind in self.encoders:
            return self.encoders[kind]
        functions = functions_without_registration(kind)
        # A class that this rank cannot find by name cannot be found on other ranks either.
        if functions is None or _type_named(type_name(kind)) is not kind:
            return None
        self.add(kind, type_name(kind), *functions)
        return self.encoders[kind]

    def fields_of(self, value: object) -> Any:
        """Return the result of ``flatten`` for a value of a known type; None for any other value."""
        entry = self.fallback(type(value))
        return None if entry is None else entry[1](value)


def type_name(kind: type) -> str:
    """Return the default name of a type."""
    return f"{kind.__module__}:{kind.__qualname__}"


def _type_named(name: str) -> type | None:
    """Return a class in the modules already imported; None if there is none with this name.

    The name may come from another rank, so the lookup runs no code: it only reads dictionaries, because ``getattr`` on
    a module may import another one.
    """
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        try:
            found = object.__getattribute__(found, "__dict__").get(part)
        except AttributeError:
            return None
    return found if isinstance(found, type) else None


registry = ValueRegistry()
