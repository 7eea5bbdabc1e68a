"""Types that cross ranks without registration: records, and ordinary types of Python, torch, NumPy and transformers.

Objects of these are built without running code of their class, but for outputs of ``transformers``, whose entries are
set by ``__init__``, and flags.
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

#: What a class with a state, a way to be made or an end of its own defines.
_OWN_WAYS = ("__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__new__", "__del__")


def functions_without_registration(kind: type) -> Functions | None:
    """How values of such a type are taken apart and built again; None for other types."""
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
    """Those of named tuples, ``PackedSequence`` among them, and of what ``torch.max`` and others return."""
    make: Callable[[Any], Any] | None = None
    if hasattr(kind, "_fields") and hasattr(kind, "_make"):
        make = kind._make
    elif kind.__module__ == "torch.return_types":
        make = kind
    return None if make is None else (tuple, make)


def _is_plain_dataclass(kind: type) -> bool:
    """Whether a dataclass is nothing but its attributes."""
    if not dataclasses.is_dataclass(kind) or issubclass(kind, nn.Module):
        return False
    for base in kind.__mro__[:-1]:
        for name in _OWN_WAYS:
            own = vars(base).get(name)
            # A frozen dataclass with slots is given functions for its state.
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
