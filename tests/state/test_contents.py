"""What is in a value is remembered, compared and put back, in the very same containers and objects."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from shardwright.contents import cells_of, reached, restore_cells
from shardwright.opaque import are_same

from tests.state.held import HELD

ITERATORS: dict[str, Callable[[], Iterator[Any]]] = {
    "count": lambda: itertools.count(1000, 7),
    "cycle": lambda: itertools.cycle([1, 2]),
    "repeat": lambda: itertools.repeat(3, 9),
    "chain": lambda: itertools.chain([1], [2, 3], [4]),
    "islice": lambda: itertools.islice([1, 2, 3, 4], 3),
    "accumulate": lambda: itertools.accumulate([1000, 2000, 3000]),
    "product": lambda: itertools.product((1, 2), (3, 4)),
    "zip_longest": lambda: itertools.zip_longest([1, 2], [3]),
    "enumerate": lambda: enumerate("abc"),
    "zip": lambda: zip([1, 2], "ab", strict=False),
    "map": lambda: map(str, [1, 2]),
    "filter": lambda: filter(None, [1, 2, 0, 3]),
    "range": lambda: iter(range(2000, 2005)),
    "tuple": lambda: iter((1, 2)),
    "text": lambda: iter("abé"),
    "bytes": lambda: iter(b"ab"),
    "dict": lambda: iter({1: 2, 3: 4}),
    "values": lambda: iter({1: 2, 3: 4}.values()),
    "set": lambda: iter({1, 2}),
    "reversed list": lambda: reversed([1, 2]),
    "reversed dict": lambda: reversed({1: 2, 3: 4}),
}


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("kind", ITERATORS)
def test_a_copy_of_an_iterator_goes_on_where_it_was(kind: str, steps: int) -> None:
    holder, wanted = [ITERATORS[kind]()], ITERATORS[kind]()
    for _ in range(steps):
        next(holder[0])
        next(wanted)
    expected = list(itertools.islice(wanted, 6))
    cells, _ = cells_of([holder])
    cell = next(one for one in cells if one.value is holder[0])
    assert are_same(cell.parts, cell.parts_now)
    assert not restore_cells(cells), "nothing has changed"
    for _ in range(3):  # it can be put back again and again
        next(holder[0])
        assert restore_cells(cells)
    assert list(itertools.islice(holder[0], 6)) == expected


@pytest.mark.parametrize("kind", [kind for kind in HELD if "tensor" not in kind])
def test_what_is_put_back_is_as_it_was(kind: str) -> None:
    make, bump = HELD[kind]
    expected = [bump(held) for held in [make()] for _ in range(6)][2:]
    held = make()
    holder = {"held": held}
    for _ in range(2):
        bump(held)
    cells, _ = cells_of([holder])
    for _ in range(2):
        for _ in range(3):
            bump(holder["held"])
        assert any(not are_same(cell.parts, cell.parts_now) for cell in cells)
        restore_cells(cells)
    assert [bump(holder["held"]) for _ in range(4)] == expected
    assert holder["held"] is held or hasattr(held, "__next__"), "only iterators are replaced"


def test_an_iterator_through_a_generator_is_left_alone() -> None:
    holder = [enumerate(number for number in range(9))]
    cells, _ = cells_of([holder])
    next(holder[0])
    assert not restore_cells(cells)


def test_the_same_container_at_two_places_stays_one() -> None:
    inner = [1]
    outer = {"first": inner, "second": [inner, (inner,)]}
    cells, _ = cells_of([outer])
    outer["first"] = []
    inner.append(2)
    restore_cells(cells)
    assert inner == [1]
    assert outer["first"] is inner
    assert outer["second"][1][0] is inner  # type: ignore[index]


def test_values_far_down_are_reached_until_there_are_too_many() -> None:
    chain: list[Any] = []
    for _ in range(900):
        chain = [chain]
    assert len(list(reached(chain))) == 901
    for _ in range(9000):
        chain = [chain]
    assert len(list(reached(chain))) < 1100
