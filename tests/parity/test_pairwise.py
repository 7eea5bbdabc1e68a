"""A pairwise choice leaves out no problem, and no two settings that meet in some case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

import tests.parity_tp.cases as tensor
from tests.parity.cases import Case, all_cases
from tests.parity.pairwise import factors, pairs, pairwise


@pytest.mark.parametrize(("cases", "settings"), [(all_cases(), factors), (tensor.cases(), tensor.factors)])
def test_every_problem_and_every_two_settings_are_there(
    cases: Sequence[Any], settings: Callable[[Any], list[Any]]
) -> None:
    chosen = pairwise(cases, settings)
    assert set(chosen) <= set(cases)
    assert len(chosen) < len(cases) / 3
    covered = set().union(*(pairs(case, settings) for case in chosen))
    assert covered == set().union(*(pairs(case, settings) for case in cases))
    assert {case.problem for case in chosen} == {case.problem for case in cases}


def test_a_case_covers_its_problem_and_its_settings_two_by_two() -> None:
    covered = pairs(Case("GPT-2", 2, 1, "simple", 4, keys=(("static_mode", True),)), factors)
    assert ("GPT-2",) in covered
    assert (("schedule", "simple"), ("static_mode", True)) in covered
    assert len(covered) == 1 + 7 * 6 // 2
