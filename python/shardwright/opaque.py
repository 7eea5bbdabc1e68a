"""State that can only be read and written as a whole: iterators, random number generators, arrays."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import marshal
import operator
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

#: Bytes and arrays that are larger are neither copied nor compared at every task.
MAX_BYTES = 64 << 10
#: Types whose values hold nothing that can change.
SIMPLE = frozenset({bool, int, float, complex, str, bytes, type(None)})


class Kind(NamedTuple):
    """How to read and write the contents of values of a type.

    Attributes:
        read: A copy of what is in a value: a list, a dict, bytes, or a tuple of such.
        parts: What is in such a copy, keys included.
        write: Puts a copy back into a value that has changed; None where only what the value refers to can change.
        has_names: Whether these are attributes, by name.
        size: How many items there are, to tell what would be slow to look through.
    """

    read: Callable[[Any], Any]
    parts: Callable[[Any], list[Any]]
    write: Callable[[Any, Any], None] | None
    has_names: bool = False
    size: Callable[[Any], int] = lambda value: 0


class Frozen:
    """A comparable position of an iterator."""

    __slots__ = ("items",)

    def __init__(self, items: list[Any]) -> None:
        """Of these numbers and objects."""
        self.items = items

    def __eq__(self, other: object) -> bool:
        """Whether the position is the same."""
        return isinstance(other, Frozen) and are_same(self.items, other.items)

    def __hash__(self) -> int:
        """Positions that are the same have as many items."""
        return len(self.items)


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are identical: the same object, or equal numbers or strings."""
    kind = type(one)
    return one is other or (kind is type(other) and (kind in SIMPLE or kind is Frozen) and bool(one == other))


def are_same(some: list[Any], others: list[Any]) -> bool:
    """Whether all pairs of values are identical."""
    return len(some) == len(others) and all(map(is_same, some, others))


def _is_unchanged(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and type(one) in (bytes, Frozen) and bool(one == other))


def are_unchanged(some: list[Any], others: list[Any]) -> bool:
    """Whether both contain the same objects, apart from copies made for comparison."""
    return len(some) == len(others) and all(map(_is_unchanged, some, others))


def holds_the_very_same(value: list[Any] | dict[Any, Any], before: list[Any] | dict[Any, Any]) -> bool:
    """Whether a list or dict contains the same objects as before. This is a hot path."""
    if len(value) != len(before):
        return False
    if isinstance(before, list):
        return all(map(operator.is_, list.__iter__(value), before))  # type: ignore[arg-type]
    keys, items = dict.__iter__(value), dict.values(value)  # type: ignore[arg-type]
    return all(map(operator.is_, keys, before)) and all(map(operator.is_, items, before.values()))


def random_kind(kind: type) -> Kind | None:
    """The kind of random number generators, except those that the library manages."""
    get: Callable[[Any], Any]
    put: Callable[[Any, Any], Any]
    shared: list[Any] = [torch.default_generator, getattr(random, "_inst", None)]
    if issubclass(kind, random.Random):
        get, put = random.Random.getstate, random.Random.setstate
    elif issubclass(kind, torch.Generator):
        get, put = torch.Generator.get_state, torch.Generator.set_state
    elif kind.__module__.startswith("numpy.random") and hasattr(kind, "get_state"):
        get, put = operator.methodcaller("get_state"), lambda value, state: value.set_state(state)
        shared.append(sys.modules["numpy"].random.mtrand._rand)
    elif kind.__module__.startswith("numpy.random") and hasattr(kind, "bit_generator"):
        get = operator.attrgetter("bit_generator.state")
        put = lambda value, state: setattr(value.bit_generator, "state", state)  # noqa: E731
    else:
        return None

    def read(value: Any) -> Any:
        return () if any(value is one for one in shared) else (get(value),)

    def parts(state: Any) -> list[Any]:
        return [_bytes_of(one) for one in state]

    def write(value: Any, before: Any) -> None:
        put(value, *before)

    return Kind(read, parts, write)


def _bytes_of(state: Any) -> bytes:
    if isinstance(state, torch.Tensor):
        return ctypes.string_at(state.data_ptr(), state.numel())
    return marshal.dumps(state, 2)  # which looks at values only, and takes arrays for their bytes


def numpy_kind(kind: type) -> Kind | None:
    """The kind of small NumPy arrays."""
    if kind.__module__ != "numpy" or kind.__name__ != "ndarray":
        return None

    def read(value: Any) -> Any:
        return (value.copy(),) if value.nbytes <= MAX_BYTES and not value.dtype.hasobject else ()

    def parts(state: Any) -> list[Any]:
        return [one.tobytes() for one in state]

    def write(value: Any, before: Any) -> None:
        if before and value.shape == before[0].shape:
            value[...] = before[0]

    return Kind(read, parts, write)


_NOTHING: dict[Any, Any] = {}
_UNORDERED: tuple[Any, ...] = (_NOTHING, _NOTHING.values(), _NOTHING.items(), set())
_ITERABLES: tuple[Any, ...] = ([], (), range(1), range(1 << 70), "", "é", b"")
#: They tell only how many items are left.
_COUNTED = (*(type(iter(items)) for items in _UNORDERED), type(reversed(_NOTHING)))
ITERATORS: tuple[type, ...] = (
    *(itertools.count, itertools.cycle, itertools.repeat, itertools.chain, itertools.islice, itertools.accumulate),
    *(itertools.product, itertools.zip_longest, itertools.starmap, itertools.permutations, itertools.combinations),
    *(enumerate, zip, map, filter, reversed),
    *(type(iter(items)) for items in _ITERABLES),
    *(type(reversed([])), *_COUNTED),
)


def _position(value: Any) -> tuple[list[Any], Any]:
    """Return the position of an iterator, and a copy at the same position.

    Raises :class:`TypeError` if it goes through something that cannot be copied, such as a generator.
    """
    if isinstance(value, _COUNTED):
        copy = iter(list(value.__reduce__()[1][0]))
        return [operator.length_hint(value)], copy
    make, given, *rest = value.__reduce__()
    position: list[Any] = []

    def copied(item: Any) -> Any:
        if isinstance(item, ITERATORS):
            inner, copy = _position(item)
            position.extend(inner)
            return copy
        if hasattr(type(item), "__next__"):
            raise TypeError(f"{type(item).__name__} cannot be copied")
        if type(item) is range:  # made anew each time, as are tuples
            position.extend((item.start, item.stop, item.step))
        elif type(item) is tuple:
            position.extend(item)
        else:
            position.append(item)
        return item

    arguments = [copied(item) for item in given]
    copy = make(*arguments)
    if rest and rest[0] is not None:
        state = rest[0]
        if isinstance(state, tuple):  # in it, `cycle` goes on to change a list
            state = tuple(list(item) if type(item) is list else copied(item) for item in state)
            position.append(len(state[0]) if type(state[0]) is list else 0)
        else:
            position.append(state)
        copy.__setstate__(state)
    return position, copy


def read_iterator(value: Any) -> Any:
    """Read the position of an iterator and a copy of it; None if it cannot be copied."""
    with warnings.catch_warnings() if sys.version_info >= (3, 12) else contextlib.nullcontext():
        if sys.version_info >= (3, 12):
            warnings.simplefilter("ignore", DeprecationWarning)
        try:
            position, copy = _position(value)
        except (TypeError, AttributeError):
            return ()
    return (Frozen(position), copy)


#: Iterators cannot be set back: a copy takes the place of one in what holds it (see `restore_cells`).
ITERATOR = Kind(read_iterator, lambda state: list(state[:1]), lambda value, before: None)
