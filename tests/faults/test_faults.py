"""A choice of faults in which every fault meets every layout and every moment, and every moment every layout."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable

import pytest

from tests.covering import covering
from tests.faults.cases import Case, all_cases
from tests.faults.runner import run

WORKERS = 2
#: How long the slowest rank may take to raise where nobody has to be waited for.
SLOWEST_SECONDS = 3.0


def pairs(case: Case) -> Iterable[Hashable]:
    """What meets in a case."""
    values = (("layout", case.layout), ("fault", case.fault), ("moment", case.moment))
    return itertools.combinations(values, 2)


CHOSEN = [case for case in covering(all_cases(), pairs) if case.fault != "stop for ever"]


@pytest.fixture(scope="module")
def outcomes() -> dict[Case, str]:
    """What is wrong, by case."""
    found = {}
    for one in run(CHOSEN, WORKERS, lambda outcome: None):
        slow = one.seconds is not None and one.seconds >= SLOWEST_SECONDS and not one.case.waits_by_contract
        found[one.case] = one.note or ("nothing that is known" if one.is_bad else f"{one.seconds} s" if slow else "")
    return found


def test_the_choice_is_of_every_fault() -> None:
    assert {case.fault for case in CHOSEN} == {case.fault for case in all_cases()} - {"stop for ever"}


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.name)
def test_a_fault_is_named_on_every_rank_and_the_next_step_is_exact(outcomes: dict[Case, str], case: Case) -> None:
    assert outcomes[case] == ""
