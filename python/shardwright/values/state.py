"""Take objects apart into their state, and build them without calling ``__init__``.

``__init__`` may have side effects, such as checks or counters, that the sender's object has had already. The state is
that of ``__getstate__`` and ``__setstate__``, which ``copy`` uses too: the attributes in ``__dict__`` and in slots,
unless the class defines these methods.
"""

from __future__ import annotations

import types
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from enum import Enum, Flag
from typing import Any

from shardwright.errors import ConfigError

Functions = tuple[Callable[[Any], Any], Callable[[Any], Any]]

#: Default factories of a ``defaultdict`` that are sent by name.
_FACTORIES: dict[str, type] = {
    kind.__name__: kind
    for kind in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, OrderedDict, Counter)
}


def functions_of(kind: type) -> Functions:
    """Return the functions that take values of a class apart and build them from their state.

    Raises:
        ConfigError: The values consist of more than attributes and, for a ``dict``, entries.
    """
    if issubclass(kind, Flag):
        return lambda value: value._value_, kind
    if issubclass(kind, Enum):
        return lambda value: value._name_, lambda name: kind[name]
    base = _made_by(kind)
    if base is dict:
        return dict_functions(kind)
    problem = None if base is object else f"it is a {base.__name__}"
    if problem is None and not hasattr(kind, "__del__"):
        try:
            object.__new__(kind)
        except TypeError as error:
            problem = str(error)
    if problem is not None:
        raise ConfigError(
            f"register_type({kind.__qualname__}): how to take it apart is not known ({problem}); give flatten and "
            "unflatten"
        )
    return _state_of, lambda state: _set_state(object.__new__(kind), state)


def state_functions(kind: type) -> Functions:
    """Return the functions for objects that consist of their attributes only; they run no code of the class.

    Attributes that are not set remain unset.
    """

    def unflatten(attributes: dict[str, Any]) -> Any:
        value: Any = object.__new__(kind)
        for name, item in attributes.items():
            if any(isinstance(vars(base).get(name), types.MemberDescriptorType) for base in kind.__mro__):
                object.__setattr__(value, name, item)
            else:  # bypasses a property of that name
                object.__getattribute__(value, "__dict__")[name] = item
        return value

    return attributes_of, unflatten


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, in its ``__dict__`` and in slots."""
    state: Any = object.__getstate__(value)
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    return {**(attributes or {}), **(slots or {})}


def crosses_by_itself(kind: type) -> bool:
    """Return whether a subclass of ``dict`` defines no state methods, so that building one runs none of its code."""
    return not any(vars(base).keys() & {"__getstate__", "__setstate__"} for base in kind.__mro__[:-1])


def dict_functions(kind: type) -> Functions:
    """Return functions that take a subclass of ``dict`` apart into entries, state and default factory, and build it."""
    base: type[dict[Any, Any]] = OrderedDict if issubclass(kind, OrderedDict) else dict
    makes_defaults = issubclass(kind, defaultdict)

    def flatten(value: Any) -> dict[str, Any]:
        fields: dict[str, Any] = {"items": dict(base.items(value))}
        state = _state_of(value)
        if state is value:  # its `__dict__` is the dict itself
            fields["keys_are_attributes"] = True
        elif state is not None and not (type(state) is dict and not state):
            fields["state"] = state
        if makes_defaults and (factory := value.default_factory) is not None:
            # Any other factory stays in place, and is refused like every value that cannot be sent.
            known = isinstance(factory, type) and _FACTORIES.get(factory.__name__) is factory
            fields["default_factory"] = factory.__name__ if known else factory
        return fields

    def unflatten(fields: dict[str, Any]) -> Any:
        value: Any = dict.__new__(kind)
        if makes_defaults and (factory := fields.get("default_factory")) is not None:
            value.default_factory = _FACTORIES.get(factory, factory) if isinstance(factory, str) else factory
        for key, item in fields["items"].items():
            base.__setitem__(value, key, item)
        if "keys_are_attributes" in fields:
            object.__setattr__(value, "__dict__", value)
        elif "state" in fields:
            _set_state(value, fields["state"])
        return value

    return flatten, unflatten


def _made_by(kind: type) -> type:
    """Return the built-in class whose ``__new__`` allocates a value."""
    return next(base for base in kind.__mro__ if isinstance(vars(base).get("__new__"), types.BuiltinFunctionType))


def _state_of(value: Any) -> Any:
    return value.__getstate__()


def _set_state(value: Any, state: Any) -> Any:
    if hasattr(type(value), "__setstate__"):
        value.__setstate__(state)
        return value
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    if attributes:
        vars(value).update(attributes)
    for name, item in (slots or {}).items():
        object.__setattr__(value, name, item)
    return value
