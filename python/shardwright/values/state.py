"""Taking objects apart into their state, and building them again without ``__init__``.

``__init__`` may compute, check or count what the sender's object has done already. The state is Python's own
(``__getstate__`` and ``__setstate__``, which ``copy`` uses too): the attributes, in ``__dict__`` and in slots, unless
the class says otherwise.
"""

from __future__ import annotations

import types
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from enum import Enum, Flag
from typing import Any

from shardwright.errors import ConfigError

Functions = tuple[Callable[[Any], Any], Callable[[Any], Any]]

#: What a ``defaultdict`` may make by itself on another rank.
_FACTORIES: dict[str, type] = {
    kind.__name__: kind
    for kind in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, OrderedDict, Counter)
}


def functions_of(kind: type) -> Functions:
    """How values of a class are taken apart and built again, if the class need not be asked.

    Raises:
        ConfigError: Its values hold more than attributes and, in a ``dict``, entries.
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
    """How objects that are nothing but their attributes are taken apart and built again, past all code of their class.

    Attributes that are not set stay so.
    """

    def unflatten(attributes: dict[str, Any]) -> Any:
        value: Any = object.__new__(kind)
        for name, item in attributes.items():
            if any(isinstance(vars(base).get(name), types.MemberDescriptorType) for base in kind.__mro__):
                object.__setattr__(value, name, item)
            else:  # a property of that name is passed by
                object.__getattribute__(value, "__dict__")[name] = item
        return value

    return attributes_of, unflatten


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes that an object has, in its ``__dict__`` and in slots."""
    state: Any = object.__getstate__(value)
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    return {**(attributes or {}), **(slots or {})}


def crosses_by_itself(kind: type) -> bool:
    """Whether a subclass of ``dict`` leaves its state to Python, so that building one calls nothing of its own."""
    return not any(vars(base).keys() & {"__getstate__", "__setstate__"} for base in kind.__mro__[:-1])


def dict_functions(kind: type) -> Functions:
    """How a subclass of ``dict`` is taken apart into entries, attributes and default, and built again."""
    base: type[dict[Any, Any]] = OrderedDict if issubclass(kind, OrderedDict) else dict
    makes_defaults = issubclass(kind, defaultdict)

    def flatten(value: Any) -> dict[str, Any]:
        fields: dict[str, Any] = {"items": dict(base.items(value))}
        state = _state_of(value)
        if state is value:  # its keys are its attributes
            fields["keys_are_attributes"] = True
        elif state is not None and not (type(state) is dict and not state):
            fields["state"] = state
        if makes_defaults and (factory := value.default_factory) is not None:
            # Another one is refused by its place, as every value is that does not cross.
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
    """The built-in class whose ``__new__`` makes the memory of a value."""
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
