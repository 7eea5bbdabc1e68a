"""A choice of cases in which every problem occurs, and every two settings that occur together somewhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from tests.covering import covering

from .cases import Case

C = TypeVar("C", bound=Case)
Pair = tuple[Hashable, ...]


def factors(case: Case) -> list[Hashable]:
    """The settings of a case, but for its problem."""
    return [
        ("topology", case.topology),
        ("schedule", case.schedule),
        ("microbatches", case.microbatches),
        ("average", case.average),
        ("partition", case.partition is not None),
        ("delayed", case.delayed),
        *([("life", case.life)] if case.life else []),
        *case.keys,
        *case.options,
    ]


def pairs(case: C, settings: Callable[[C], Iterable[Hashable]]) -> set[Pair]:
    """What choosing a case covers: its problem, and each two of its settings."""
    return {(case.problem,), *itertools.combinations(sorted(settings(case), key=repr), 2)}


def pairwise(cases: Sequence[C], settings: Callable[[C], Iterable[Hashable]] = factors) -> list[C]:
    """The fewest cases, chosen greedily, that cover what all of them do; in their order."""
    return covering(cases, lambda case: pairs(case, settings))
