"""Covering arrays: a choice of cases in which all that occurs together somewhere in all of them occurs together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import pytest

C = TypeVar("C")


def covering(cases: Sequence[C], covered: Callable[[C], Iterable[Hashable]]) -> list[C]:
    """The fewest cases, chosen greedily, that cover what all of them do; in their order."""
    covers = [set(covered(case)) for case in cases]
    left: set[Hashable] = set().union(*covers)
    chosen: set[int] = set()
    while left:
        best = max(range(len(cases)), key=lambda number: len(covers[number] & left))
        chosen.add(best)
        left -= covers[best]
    return [case for number, case in enumerate(cases) if number in chosen]


def mark_slow(items: Iterable[pytest.Item]) -> None:
    """Of each test marked ``covering(strength)``, leave cases in which every so many values of its parameters meet.

    The others are marked slow. The mark may be a whole file's; tests without parameters are left.
    """
    tests: dict[tuple[pytest.Item | pytest.Collector | None, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and item.get_closest_marker("covering"):
            tests.setdefault((item.parent, item.originalname), []).append(item)
    for (_, name), cases in tests.items():
        marker = cases[0].get_closest_marker("covering")
        assert marker is not None, name
        (strength,) = marker.args

        def covered(item: pytest.Function, strength: int = strength) -> Iterable[Hashable]:
            values = [(name, repr(value)) for name, value in item.callspec.params.items()]
            return itertools.combinations(values, strength)

        kept = covering(cases, covered)
        for item in cases:
            if item not in kept:
                item.add_marker(pytest.mark.slow)
