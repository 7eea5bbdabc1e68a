"""Values of well-known classes that checkpoints give back as they were, each made of a simpler value."""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import keyword
import math
import pathlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shardwright.checkpoints.left_out import KINDS


@dataclass(frozen=True)
class Known:
    """A class, and what its values are made of.

    Attributes:
        name: What it is called in files.
        simpler: Returns what a value is made of; None for a value that is of another kind after all.
        make: Makes the value of that. It is given what a file says, so that it must not run code nor use more memory
            than the file has.
    """

    name: str
    simpler: Callable[[Any], Any]
    make: Callable[[Any], Any]


#: Without arguments, what a defaultdict can make its missing values with.
_FACTORIES: dict[str, type] = {kind.__name__: kind for kind in (bool, int, float, str, list, tuple, dict, set)}
_PATHS = (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath)
_TORCH_NAMES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.layout | torch.memory_format)
}
#: Of named tuples; a file with many names makes many classes.
_MAX_CLASSES = 1000
_classes: dict[tuple[str, tuple[str, ...]], type[Any]] = {}


def _defaultdict(value: collections.defaultdict[Any, Any]) -> Any:
    factory = value.default_factory
    if factory is not None and _FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
        return None
    return None if factory is None else factory.__name__, dict(value)


def _make_defaultdict(found: tuple[str | None, dict[Any, Any]]) -> Any:
    name, items = found
    if type(items) in KINDS:  # what it lacks would be made anew
        return items
    return collections.defaultdict(None if name is None else _FACTORIES[name], items)


def _make_counter(items: dict[Any, Any]) -> Any:
    return items if type(items) in KINDS else collections.Counter(items)


def _path(value: pathlib.PurePath) -> Any:
    return type(value).__name__, str(value)


def _make_path(found: tuple[str, str]) -> Any:
    name, text = found
    kind = {each.__name__: each for each in _PATHS}[name]
    if issubclass(kind, pathlib.Path) and kind.__name__ != type(pathlib.Path()).__name__:  # of another system
        kind = pathlib.PureWindowsPath if kind is pathlib.WindowsPath else pathlib.PurePosixPath
    return kind(text)


def _moment(value: Any) -> Any:
    zone = value.tzinfo
    if zone is not None and type(zone) is not datetime.timezone:
        return None
    return value.replace(tzinfo=None, fold=0).isoformat(), value.fold, zone


def _zone(value: datetime.timezone) -> Any:
    offset = value.utcoffset(None)
    name = value.tzname(None)
    return (offset, name) if datetime.timezone(offset).tzname(None) != name else (offset,)


def _masked(value: Any) -> Any:
    return np.asarray(value.data), np.ma.getmaskarray(value), value.fill_value


def _make_masked(found: tuple[Any, Any, Any]) -> Any:
    data, mask, fill_value = found
    return np.ma.MaskedArray(data, mask=mask, fill_value=fill_value)


_KNOWN: dict[type, Known] = {
    bytearray: Known("bytearray", bytes, bytearray),
    range: Known("range", lambda value: (value.start, value.stop, value.step), lambda found: range(*found)),
    slice: Known("slice", lambda value: (value.start, value.stop, value.step), lambda found: slice(*found)),
    type(...): Known("Ellipsis", lambda value: True, lambda found: ...),
    collections.deque: Known(
        "deque", lambda value: (list(value), value.maxlen), lambda found: collections.deque(found[0], found[1])
    ),
    collections.Counter: Known("Counter", dict, _make_counter),
    collections.defaultdict: Known("defaultdict", _defaultdict, _make_defaultdict),
    decimal.Decimal: Known("Decimal", str, decimal.Decimal),
    fractions.Fraction: Known(
        "Fraction", lambda value: (value.numerator, value.denominator), lambda found: fractions.Fraction(*found)
    ),
    uuid.UUID: Known("UUID", lambda value: value.hex, uuid.UUID),
    datetime.timedelta: Known(
        "timedelta",
        lambda value: (value.days, value.seconds, value.microseconds),
        lambda found: datetime.timedelta(*found),
    ),
    datetime.timezone: Known("timezone", _zone, lambda found: datetime.timezone(*found)),
    datetime.date: Known("date", lambda value: value.isoformat(), datetime.date.fromisoformat),
    datetime.datetime: Known(
        "datetime",
        _moment,
        lambda found: datetime.datetime.fromisoformat(found[0]).replace(fold=found[1], tzinfo=found[2]),
    ),
    datetime.time: Known(
        "time", _moment, lambda found: datetime.time.fromisoformat(found[0]).replace(fold=found[1], tzinfo=found[2])
    ),
    np.ma.MaskedArray: Known("masked array", _masked, _make_masked),
    **dict.fromkeys(_PATHS, Known("path", _path, _make_path)),
    **dict.fromkeys(
        (torch.layout, torch.memory_format),
        Known("torch", lambda value: str(value).removeprefix("torch."), _TORCH_NAMES.__getitem__),
    ),
}


def _make_array_of_objects(found: tuple[tuple[int, ...], list[Any]]) -> Any:
    shape, items = found
    if math.prod(shape) != len(items):
        raise ValueError(f"{len(items)} items for the shape {shape}")
    whole = np.empty(len(items), object)
    for index, item in enumerate(items):
        whole[index] = item
    return whole.reshape(shape)


def _make_dtype(found: Any) -> np.dtype[Any]:
    dtype = np.lib.format.descr_to_dtype(_as_descr(found))
    if dtype.hasobject:
        raise ValueError("a dtype with objects")
    return dtype


def _as_descr(found: Any) -> Any:
    """As NumPy writes it: fields are tuples, and JSON has lists."""
    if isinstance(found, list):
        return [tuple(_as_descr(each) for each in field) for field in found]
    return tuple(found) if isinstance(found, tuple) else found


def _named_tuple(value: Any) -> Any:
    return type(value).__name__, type(value)._fields, tuple(tuple.__iter__(value))


def _make_named_tuple(found: tuple[str, tuple[str, ...], tuple[Any, ...]]) -> Any:
    """Make a named tuple whose class has the names of the saved one; it is made here, and not looked for."""
    name, fields, items = found
    key = name, fields
    if key not in _classes:
        if len(_classes) >= _MAX_CLASSES:
            raise ValueError(f"there are more than {_MAX_CLASSES} classes of named tuples")
        is_name = name.isidentifier() and not keyword.iskeyword(name)
        _classes[key] = collections.namedtuple(name if is_name else "Row", fields, rename=True)
    return _classes[key](*items)


_BY_SHAPE = {
    "objects": Known("objects", lambda value: (value.shape, value.ravel().tolist()), _make_array_of_objects),
    "dtype of numpy": Known("dtype of numpy", np.lib.format.dtype_to_descr, _make_dtype),
    "named tuple": Known("named tuple", _named_tuple, _make_named_tuple),
}

#: By what they are called in files.
BY_NAME: dict[str, Known] = {each.name: each for each in (*_KNOWN.values(), *_BY_SHAPE.values())}


def known(value: Any) -> Known | None:
    """Return how a value of a well-known class is saved; None for others.

    Args:
        value: The value.
    """
    kind = type(value)
    if (found := _KNOWN.get(kind)) is not None:
        return found
    if isinstance(value, np.dtype):
        return None if value.hasobject else _BY_SHAPE["dtype of numpy"]
    if kind is np.ndarray and value.dtype.kind == "O":
        return _BY_SHAPE["objects"]
    return None


def is_named_tuple(value: Any) -> bool:
    """Return whether a value is a named tuple.

    Args:
        value: The value.
    """
    fields = getattr(type(value), "_fields", None)
    return (
        isinstance(value, tuple)
        and type(fields) is tuple
        and all(type(name) is str for name in fields)
        and len(fields) == len(value)
    )


NAMED_TUPLE = _BY_SHAPE["named tuple"]

__all__ = ["BY_NAME", "NAMED_TUPLE", "Known", "is_named_tuple", "known"]
