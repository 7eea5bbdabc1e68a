"""Snapshots of Python values: reading, comparing and restoring containers, objects and iterators."""

from __future__ import annotations

import array
import collections
import contextlib
import enum
import functools
import io
import logging
import pathlib
import random
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from shardwright.opaque import (
    ITERATOR,
    ITERATORS,
    Kind,
    are_same,
    are_unchanged,
    numpy_kind,
    random_kind,
    read_iterator,
)

#: What `nn.Module` itself keeps in a module; the library's own interception writes some of them.
INTERNAL = frozenset(nn.Module().__dict__) | {"forward", "_compiled_call_impl", "__dict__", "__class__"}
#: Objects of these packages are not the model's own.
FOREIGN = frozenset(
    {"builtins", "torch", "shardwright", "logging", "threading", "numpy", "functools", "weakref", "collections", "re"}
)
#: Beyond this depth no more than so many values are looked through.
MAX_DEPTH, MAX_BEYOND = 4, 1000
Others = dict[int, Any] | None  # values in the place of others, by their ``id``
_NO_STATE = (
    nn.Module,
    torch.Tensor,
    type,
    types.ModuleType,
    types.FunctionType,
    logging.Logger,
    pathlib.PurePath,
    enum.Enum,
    random.SystemRandom,
)


def _flat(items: dict[Any, Any]) -> list[Any]:
    return [part for item in items.items() for part in item]


def restore_dict(found: dict[Any, Any], wanted: dict[Any, Any]) -> None:
    """Restore the items of a dict in order, without modifying an unchanged one."""
    if [*dict.keys(found)] != [*wanted]:
        dict.clear(found)
        dict.update(found, wanted)
        return
    for key, value in list(dict.items(found)):
        if value is not wanted[key]:
            dict.__setitem__(found, key, wanted[key])


# Subclasses may make values when they are asked for them, or count calls: their base class's methods do not.
def _read_ordered(value: collections.OrderedDict[Any, Any]) -> dict[Any, Any]:
    return {key: dict.__getitem__(value, key) for key in collections.OrderedDict.__iter__(value)}


def _write_ordered(value: collections.OrderedDict[Any, Any], before: dict[Any, Any]) -> None:
    collections.OrderedDict.clear(value)
    for key, item in before.items():
        collections.OrderedDict.__setitem__(value, key, item)


def _by_number(items: list[Any]) -> list[Any]:
    return sorted(items, key=id)


def _set_all(kind: Any) -> Callable[[Any, Any], None]:
    return lambda value, before: kind.__setitem__(value, slice(None), before)


def _write_array(value: array.array[Any], before: bytes) -> None:
    array.array.__setitem__(value, slice(None), array.array(value.typecode, before))


def _write_set(value: set[Any], before: list[Any]) -> None:
    set.clear(value)
    set.update(value, before)


def _write_deque(value: collections.deque[Any], before: list[Any]) -> None:
    collections.deque.clear(value)
    collections.deque.extend(value, before)


def _read_file(value: Any) -> Any:
    return () if value.closed else value.__getstate__()[:-1]  # the last are attributes


def _write_file(value: Any, before: tuple[Any, ...]) -> None:
    if before and not value.closed and _read_file(value) != before:
        value.__setstate__((*before, None))


_CONTAINERS: dict[type, Kind] = {
    list: Kind(lambda value: list(list.__iter__(value)), list, _set_all(list), size=list.__len__),
    collections.OrderedDict: Kind(_read_ordered, _flat, _write_ordered, size=dict.__len__),
    dict: Kind(lambda value: dict(dict.items(value)), _flat, restore_dict, size=dict.__len__),
    set: Kind(lambda value: list(set.__iter__(value)), _by_number, _write_set, size=set.__len__),
    collections.deque: Kind(
        lambda value: list(collections.deque.__iter__(value)), list, _write_deque, size=collections.deque.__len__
    ),
    bytearray: Kind(
        bytes, lambda state: [state], _set_all(bytearray), size=lambda value: bytearray.__len__(value) >> 8
    ),
    array.array: Kind(
        array.array.tobytes, lambda state: [state], _write_array, size=lambda v: len(v) * v.itemsize >> 8
    ),
    io.StringIO: Kind(
        _read_file, list, _write_file, size=lambda value: 0 if value.closed else len(value.getvalue()) >> 8
    ),
    io.BytesIO: Kind(
        _read_file, list, _write_file, size=lambda value: 0 if value.closed else value.getbuffer().nbytes >> 8
    ),
}

#: Values that cannot change themselves, but lead to others.
_PASSAGES: dict[type, Callable[[Any], list[Any]]] = {
    tuple: lambda value: list(tuple.__iter__(value)),
    frozenset: lambda value: list(frozenset.__iter__(value)),
    functools.partial: lambda value: [value.func, *value.args, value.keywords],
    types.MethodType: lambda value: [value.__self__],
}


def _slots_of(kind: type) -> dict[str, Any]:
    if kind.__module__.partition(".")[0] in sys.stdlib_module_names:
        return {}
    return {
        name: slot
        for base in reversed(kind.__mro__)
        if "__slots__" in vars(base)
        for name, slot in vars(base).items()
        if isinstance(slot, types.MemberDescriptorType)
    }


def _in_slots(value: Any, slots: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, slot in slots.items():
        with contextlib.suppress(AttributeError):
            found[name] = slot.__get__(value)
    return found


def restore_slots(value: Any, before: dict[str, Any]) -> None:
    """Give an object back those of its attributes that are in slots; the others of `before` do not count."""
    for name, slot in slots_of(type(value)).items():
        if name in before:
            slot.__set__(value, before[name])
        else:
            with contextlib.suppress(AttributeError):
                slot.__delete__(value)


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module, those in slots too; not to be changed."""
    slots = slots_of(type(module))
    return {**vars(module), **_in_slots(module, slots)} if slots else vars(module)


def put_attributes(module: nn.Module, wanted: dict[str, Any], others: frozenset[str]) -> None:
    """Have a module have these attributes, and besides none but `others`."""
    own, slots = vars(module), slots_of(type(module))
    for name in own.keys() - wanted.keys() - others:
        del own[name]
    own.update({name: value for name, value in wanted.items() if name not in slots} if slots else wanted)
    restore_slots(module, wanted)


def _dict_of(value: Any) -> dict[str, Any] | None:
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return attributes if type(attributes) is dict else None


def _attributes_kind(kind: type) -> Kind | None:
    """Of objects with attributes, in a dict, in slots, or in both."""
    slots = slots_of(kind)
    if not slots and not kind.__dictoffset__:
        return None

    def read(value: Any) -> dict[str, Any]:
        return {**(_dict_of(value) or {}), **_in_slots(value, slots)}

    def write(value: Any, before: dict[str, Any]) -> None:
        attributes = _dict_of(value)
        if attributes is not None:
            restore_dict(attributes, {name: item for name, item in before.items() if name not in slots})
        restore_slots(value, before)

    return Kind(read, _flat, write, has_names=True)


def _both(first: Kind, second: Kind) -> Kind:
    def write(value: Any, before: Any) -> None:
        for kind, part in zip((first, second), before, strict=True):
            assert kind.write is not None
            kind.write(value, part)

    return Kind(
        lambda value: (first.read(value), second.read(value)),
        lambda state: [*first.parts(state[0]), *second.parts(state[1])],
        write,
        size=first.size,
    )


def _kind_of(kind: type) -> Kind | None:
    if issubclass(kind, _NO_STATE):
        return None
    if issubclass(kind, threading.local):
        return Kind(lambda v: dict(v.__dict__), _flat, lambda v, old: restore_dict(v.__dict__, old), has_names=True)
    for base, own in _CONTAINERS.items():
        if issubclass(kind, base):
            attributes = None if kind.__module__ in FOREIGN else _attributes_kind(kind)
            return own if attributes is None else _both(own, attributes)
    for base, leads in _PASSAGES.items():
        if issubclass(kind, base):
            return Kind(leads, list, None)
    if issubclass(kind, ITERATORS):
        return ITERATOR
    special = random_kind(kind) or numpy_kind(kind)
    if special is not None:
        return special
    own_classes = (collections.UserDict, collections.UserList)
    if kind.__module__.partition(".")[0] in FOREIGN and not issubclass(kind, own_classes):
        return None
    return _attributes_kind(kind)


class Cell:
    """A container or object, with its contents at the time of the snapshot."""

    __slots__ = ("before", "kind", "value")

    def __init__(self, value: Any, kind: Kind) -> None:
        """Remember what is in it now."""
        self.value, self.kind, self.before = value, kind, kind.read(value)

    @property
    def parts(self) -> list[Any]:
        """The contents at the time of the snapshot."""
        return self.kind.parts(self.before)

    @property
    def parts_now(self) -> list[Any]:
        """The current contents."""
        return self.kind.parts(self.kind.read(self.value))


class Search:
    """A breadth-first search of the values reachable from a value.

    Beyond `MAX_DEPTH` levels it ends with the level in which `MAX_BEYOND` values that hold something were found.
    """

    def __init__(self, value: Any) -> None:
        """Begin with a value."""
        self._level: list[Any] = [value]
        self._following: list[Any] = []
        self._depth = self._beyond = 0

    def __iter__(self) -> Iterator[Any]:
        """Each value; whoever looks at it says by :meth:`follow` what is behind it."""
        while self._level and self._beyond < MAX_BEYOND:
            yield from self._level
            self._level, self._following = self._following, []
            self._depth += 1

    def follow(self, parts: Iterable[Any], *, holds: bool) -> None:
        """Continue with the contents of the current value."""
        self._following += parts
        self._beyond += holds and self._depth > MAX_DEPTH


def reached(value: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Iterate breadth-first over tensors, containers and objects reachable from a value."""
    seen = set() if seen is None else seen
    search = Search(value)
    for one in search:
        kind = kind_of(type(one))
        if kind is None:
            if isinstance(one, torch.Tensor) and not isinstance(one, nn.Parameter) and id(one) not in seen:
                seen.add(id(one))
                yield one
        elif id(one) not in seen:
            seen.add(id(one))
            holds = kind.write is not None
            search.follow(kind.parts(kind.read(one)), holds=holds)
            if holds:
                yield one


#: How values of a type hold state; None if they hold none, or it is somebody else's business (tensors, modules).
kind_of: Callable[[type], Kind | None] = functools.lru_cache(maxsize=4096)(_kind_of)
#: The attributes of a class that its objects have in slots, by name.
slots_of: Callable[[type], dict[str, Any]] = functools.lru_cache(maxsize=4096)(_slots_of)


def containers_in(values: Iterable[Any]) -> list[Cell]:
    """Take snapshots of the containers among some values, without objects with attributes."""
    kinds = ((value, kind_of(type(value))) for value in values)
    return [Cell(value, kind) for value, kind in kinds if kind and kind.write is not None and not kind.has_names]


def cells_of(values: Iterable[Any]) -> tuple[list[Cell], list[torch.Tensor]]:
    """Take snapshots of everything reachable from some values, and return them with the reachable tensors."""
    cells: list[Cell] = []
    tensors: list[torch.Tensor] = []
    seen: set[int] = set()
    for value in values:
        for part in reached(value, seen):
            kind = kind_of(type(part))
            if kind is None:
                tensors.append(part)
            else:
                cells.append(Cell(part, kind))
    return cells, tensors


def restore_cells(cells: Iterable[Cell], holders: Iterable[dict[str, Any]] = (), others: Others = None) -> bool:
    """Restore snapshots; iterators that have advanced are replaced with copies in their holders.

    Args:
        cells: The values.
        holders: Attributes that may hold iterators, or what is replaced, themselves.
        others: Values that take the place of others.

    Returns:
        Whether there are copies of iterators.
    """
    cells = list(cells)
    copies = dict(others or {})
    for cell in cells:
        if cell.kind is ITERATOR and cell.before and not are_same(cell.parts, cell.parts_now):
            copies[id(cell.value)] = read_iterator(cell.before[1])[1]
    for cell in cells:
        assert cell.kind.write is not None, "what only leads to others has no cell"
        before = replaced_in(cell.before, copies) if copies else cell.before
        if not are_unchanged(cell.kind.parts(before), cell.parts_now):
            cell.kind.write(cell.value, before)
    for attributes in holders if copies else ():
        for name, value in list(attributes.items()):
            if id(value) in copies:
                attributes[name] = copies[id(value)]
    return len(copies) > len(others or {})


def replaced_in(state: Any, copies: dict[int, Any]) -> Any:
    """Return the contents of a container or object with other values in the place of some, by their ``id``."""
    if type(state) is list:
        return [copies.get(id(item), item) for item in state]
    if type(state) is dict:
        return {key: copies.get(id(item), item) for key, item in state.items()}
    if type(state) is tuple and any(type(part) in (list, dict) for part in state):
        return tuple(replaced_in(part, copies) for part in state)
    return state


def put_values(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Restore the values of a tensor, and its size if it was resized."""
    with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
        if tensor.shape != values.shape:
            tensor.resize_(values.shape)
        own = tensor.detach()
        for dim, (size, stride) in enumerate(zip(own.shape, own.stride(), strict=True)):
            if size > 1 and stride == 0:  # expanded: one element at many places cannot be written at all of them
                own, values = own.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
        own.copy_(values)
