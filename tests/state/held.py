"""Values of many types that a module may hold, and ways to change them that show in a number."""

from __future__ import annotations

import array
import collections
import functools
import io
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


class Slots:
    """An object with slots alone."""

    __slots__ = ("count", "last")

    def __init__(self) -> None:
        self.count = 0


class SlotsAndMore(Slots):
    """An object with slots and other attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.other = 0


@dataclass(slots=True)
class Record:
    """A dataclass with slots."""

    counts: list[int] = field(default_factory=lambda: [0])


class OwnList(list[int]):
    """A list with attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.pushed = 0

    def push(self) -> int:
        self.append(len(self))
        self.pushed += 1
        return len(self) + self.pushed


class OwnSet(set[int]):
    """A set of one's own."""


class OwnDeque(collections.deque[int]):
    """A deque of one's own."""


class Counter:
    """Counts its calls."""

    def __init__(self) -> None:
        self.count = 0

    def counted(self) -> int:
        self.count += 1
        return self.count


def bump_slots(held: Any) -> int:
    held.count += 1
    held.last = held.count
    return int(held.count)


def bump_other(held: SlotsAndMore) -> int:
    held.other += 1
    return held.other + bump_slots(held)


def bump_record(held: Record) -> int:
    held.counts = [held.counts[0] + 1]
    return held.counts[0]


def bump_list(held: Any) -> int:
    held.append(len(held))
    return len(held)


def bump_set(held: set[int]) -> int:
    held.add(len(held))
    return len(held)


def bump_order(held: collections.OrderedDict[int, int]) -> int:
    held.move_to_end(next(iter(held)))
    return next(iter(held))


def bump_dict(held: Any) -> int:
    held["count"] = held.get("count", 0) + 1
    return int(held["count"])


def bump_first(held: Any) -> int:
    held[0] += 1
    return int(held[0])


def bump_file(held: Any) -> int:
    return held.write("ab" if isinstance(held, io.StringIO) else b"ab") + held.tell()


def bump_deep(held: Any) -> int:
    for _ in range(8):
        held = held[0]
    return bump_list(held)


def add_to(items: list[int]) -> int:
    return bump_list(items)


#: By name, how a value is made, and how it is changed.
HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "slots": (Slots, bump_slots),
    "slots and other attributes": (SlotsAndMore, bump_other),
    "dataclass with slots": (Record, bump_record),
    "count": (itertools.count, next),
    "cycle": (lambda: itertools.cycle([1, 2, 3, 5]), next),
    "iterator of a list": (lambda: iter([*range(60)]), next),
    "count in a list": (lambda: [itertools.count()], lambda held: next(held[0])),
    "enumerate": (lambda: enumerate([5] * 60), lambda held: next(held)[0]),
    "list of one's own": (OwnList, OwnList.push),
    "set of one's own": (OwnSet, bump_set),
    "deque of one's own": (OwnDeque, bump_list),
    "OrderedDict": (lambda: collections.OrderedDict.fromkeys(range(7)), bump_order),
    "Counter": (collections.Counter, bump_dict),
    "UserDict": (collections.UserDict, bump_dict),
    "UserList": (collections.UserList, bump_list),
    "array": (lambda: array.array("d", [0.0]), bump_first),
    "bytearray": (lambda: bytearray(b"\0"), bump_first),
    "NumPy array": (lambda: np.zeros(2), bump_first),
    "StringIO": (io.StringIO, bump_file),
    "BytesIO": (io.BytesIO, bump_file),
    "partial": (lambda: functools.partial(add_to, []), lambda held: held()),
    "bound method": (lambda: Counter().counted, lambda held: held()),
    "tuple": (lambda: ([0],), lambda held: bump_first(held[0])),
    "eight lists in one another": (lambda: [[[[[[[[[0]]]]]]]]], bump_deep),
    "random.Random": (lambda: random.Random(3), lambda held: held.random()),
    "numpy.random.Generator": (lambda: np.random.default_rng(3), lambda held: float(held.random())),
    "numpy.random.RandomState": (lambda: np.random.RandomState(3), lambda held: float(held.rand())),
    "torch.Generator": (
        lambda: torch.Generator().manual_seed(3),
        lambda held: float(torch.rand((), generator=held, dtype=torch.float64)),
    ),
    "small tensor": (lambda: torch.zeros(2, dtype=torch.float64), lambda held: float(held.add_(1)[0])),
    "tensor in a list": (lambda: [torch.zeros(2)], lambda held: float(held[0].add_(1)[0])),
    "view of a tensor": (lambda: torch.zeros(3, 4)[1], lambda held: float(held.add_(1)[0])),
    "element of a tensor": (lambda: torch.zeros(3), bump_first),
    "tensor in a tuple": (lambda: (torch.zeros(3),), lambda held: bump_first(held[0])),
}
