"""Types that can be sent without registration: records, and common types of Python, torch, NumPy and transformers.

Objects of these types are built without running code of their class, except flags and outputs of ``transformers``,
whose ``__init__`` sets the entries.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from enum import Enum
from typing import Any

from torch import nn

from shardwright.values import arrays
from shardwright.values.state import Functions, crosses_by_itself, dict_functions, functions_of, state_functions

#: Methods that customize the state, creation or destruction of objects.
_OWN_WAYS = ("__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__new__", "__del__")


def functions_without_registration(kind: type) -> Functions | None:
    """Return the functions that take values of such a type apart and build them; None for other types."""
    outputs = sys.modules.get("transformers.utils.generic")
    if outputs is not None and issubclass(kind, outputs.ModelOutput):
        return lambda value: dict(value.items()), lambda fields: kind(**fields)
    if issubclass(kind, tuple):
        return _tuple_functions(kind)
    if issubclass(kind, Enum):
        return functions_of(kind)
    if kind is range:
        return lambda value: (value.start, value.stop, value.step), lambda fields: range(*fields)
    if issubclass(kind, dict):
        return dict_functions(kind) if crosses_by_itself(kind) else None
    if _is_plain_dataclass(kind):
        return state_functions(kind)
    return _numpy_functions(kind)


def _tuple_functions(kind: type) -> Functions | None:
    """Return the functions for named tuples, such as ``PackedSequence``, and results of ``torch.max`` and others."""
    make: Callable[[Any], Any] | None = None
    if hasattr(kind, "_fields") and hasattr(kind, "_make"):
        make = kind._make
    elif kind.__module__ == "torch.return_types":
        make = kind
    return None if make is None else (tuple, make)


def _is_plain_dataclass(kind: type) -> bool:
    """Return whether a type is a dataclass without methods that customize state, creation or destruction."""
    if not dataclasses.is_dataclass(kind) or issubclass(kind, nn.Module):
        return False
    for base in kind.__mro__[:-1]:
        for name in _OWN_WAYS:
            own = vars(base).get(name)
            # The dataclasses module adds state methods to a frozen dataclass with slots.
            if own is not None and getattr(own, "__module__", None) != "dataclasses":
                return False
    return True


def _numpy_functions(kind: type) -> Functions | None:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if kind is numpy.ndarray:
        return arrays.array_fields, arrays.array_of
    if issubclass(kind, numpy.generic) and not issubclass(kind, (numpy.object_, numpy.void)):
        return arrays.scalar_fields, arrays.scalar_of
    return None
