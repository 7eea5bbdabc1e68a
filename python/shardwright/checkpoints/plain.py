"""What is data though its class is not known: as plain data, without the class."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwright.checkpoints.known_types import is_named_tuple

_Plain = tuple[Any, str]

#: A subclass of one of these is saved as it; what the subclass adds or overrides is not asked.
_BASES: dict[type, Callable[[Any], Any]] = {
    str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    bytearray: lambda value: bytearray(bytes(value)),
    int: int.__int__,
    float: float.__float__,
    complex: lambda value: complex(value.real, value.imag),
    list: lambda value: list(list.__iter__(value)),
    tuple: lambda value: tuple(tuple.__iter__(value)),
    OrderedDict: lambda value: OrderedDict(OrderedDict.items(value)),
    dict: lambda value: dict(dict.items(value)),
    set: lambda value: set(set.__iter__(value)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
    argparse.Namespace: lambda value: argparse.Namespace(**vars(value)),
    types.SimpleNamespace: lambda value: types.SimpleNamespace(**vars(value)),
}


def plain(value: Any) -> _Plain | None:
    """Return a value as data of a known class, and what that is; None if it is no data.

    The result may contain anything; it is looked at by who asks.

    Args:
        value: A value of no known class.
    """
    if isinstance(value, enum.Enum):
        return value.value, "its value"
    if isinstance(value, torch.Tensor):
        return _plain_tensor(value)
    if isinstance(value, np.ndarray):
        return None if isinstance(value, np.ma.MaskedArray) else (np.asarray(value), "an array")
    if is_named_tuple(value):  # an own class of named tuples is made for it
        return value, "a named tuple of the same fields"
    for base, convert in _BASES.items():
        if isinstance(value, base):
            return convert(value), f"a {base.__name__}"
    if isinstance(value, type | nn.Module | types.ModuleType) or callable(value):
        return None
    return _configuration(value) or _container(value)


def _plain_tensor(value: torch.Tensor) -> _Plain | None:
    """A tensor of a subclass that adds methods only; others may have no values where a tensor has them."""
    is_wrapper = type(value).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl
    if is_wrapper or type(value) in (torch.Tensor, nn.Parameter):
        return None
    return value.detach().as_subclass(torch.Tensor), "a tensor"


def _configuration(value: Any) -> _Plain | None:
    """What says by itself what it consists of."""
    kind = type(value)
    fields = getattr(kind, "__attrs_attrs__", None)
    # Tables and data sets have to_dict too, and a length: all that they hold is no configuration.
    if callable(getattr(kind, "to_dict", None)) and not hasattr(kind, "__len__"):
        found = value.to_dict()
        return (dict(found), "the dict of its to_dict()") if isinstance(found, Mapping) else None
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    elif isinstance(fields, tuple):
        names = [field.name for field in fields]
    elif callable(getattr(kind, "model_dump", None)):
        return dict(value.model_dump()), "the dict of its model_dump()"
    else:
        return None
    return {name: getattr(value, name) for name in names if hasattr(value, name)}, "a dict of its fields"


def _container(value: Any) -> _Plain | None:
    if isinstance(value, Mapping):
        return dict(value.items()), "a dict"
    if isinstance(value, Set):
        return set(value), "a set"
    if isinstance(value, Sequence) and not isinstance(value, memoryview):
        return list(value), "a list"
    return None
