"""The measure finds what it is there to find, and the table covers what it must."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch

from .cases import Case, all_cases
from .compare import Comparison
from .problems import PROBLEMS, check_names
from .reference import Reference
from .rows import usual_row
from .table import BAR, judge, render

CASE = Case("GPT-2", 2, 1, "simple", 2)
row = functools.partial(usual_row, CASE)


def gradients_differ(found: dict[str, Any], expected: dict[str, Any]) -> Comparison:
    comparison = Comparison()
    comparison.gradients(found, expected, "here")
    return comparison


def test_a_gradient_that_is_off_by_a_billionth_is_above_the_bar() -> None:
    weight = torch.tensor([1.0, -2.0], dtype=torch.float64)
    comparison = gradients_differ({"weight": weight * (1 + 1e-9)}, {"weight": weight})
    assert comparison.worst == pytest.approx(1e-9, rel=1e-3)
    assert comparison.worst > BAR
    assert comparison.where == "here: weight"


def test_noise_on_a_gradient_that_is_zero_is_measured_against_the_largest_of_the_model() -> None:
    bias = torch.zeros(2, dtype=torch.float64)
    expected = {"weight": torch.ones(2, dtype=torch.float64), "bias": bias}
    assert gradients_differ({"bias": bias + 1e-16}, expected).worst == pytest.approx(1e-13)


def test_imaginary_parts_are_compared_too() -> None:
    weight = torch.tensor([1 + 1j], dtype=torch.complex128)
    assert gradients_differ({"weight": weight.conj()}, {"weight": weight}).worst == pytest.approx(2**0.5)


def test_a_gradient_that_is_missing_on_one_side_is_a_failure() -> None:
    weight = torch.ones(2)
    assert gradients_differ({"weight": None}, {"weight": weight}).failures
    assert gradients_differ({"weight": weight}, {"weight": None}).failures
    assert not gradients_differ({"weight": None}, {"weight": None}).failures


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_infinitely_wrong(value: float) -> None:
    assert gradients_differ({"w": torch.tensor([value])}, {"w": torch.ones(1)}).worst == math.inf


@pytest.mark.parametrize(
    "found",
    [
        (torch.ones(2), 2, "text"),
        (torch.ones(1), 1, "text"),
        (torch.ones(2, dtype=torch.float32), 1, "text"),
        (torch.ones(2), 1),
        [torch.ones(2), 1, "text"],
    ],
)
def test_outputs_of_another_structure_are_failures(found: Any) -> None:
    comparison = Comparison()
    comparison.value(found, (torch.ones(2, dtype=torch.float64), 1, "text"), "output")
    assert comparison.failures or comparison.worst > BAR


@pytest.mark.parametrize(
    "changed",
    [
        {"worst": 1e-9},
        {"worst": math.nan},
        {"forward": 0},
        {"backward": 0},
        {"parameters": 0},
        {"failures": ["something"]},
        {"expected_forward": 7},
        {"error": "ValueError: no"},
    ],
)
def test_a_case_fails_for_each_thing_that_can_be_wrong(changed: dict[str, Any]) -> None:
    assert not judge(CASE, [row(), row()]).failures
    assert judge(CASE, [row(**changed), row(**changed)]).failures


def test_a_rank_without_a_result_fails_the_case() -> None:
    outcome = judge(CASE, [row(), None])
    assert outcome.failures
    assert "FAILED" in render([outcome])


def test_microbatches_are_averaged_or_summed_as_asked() -> None:
    problem = PROBLEMS["skip over two stages"]
    batch = problem.batch(0, torch.Generator().manual_seed(0))
    gradients = []
    for microbatches, average in ((1, True), (4, True), (4, False)):
        torch.manual_seed(0)
        reference = Reference(problem, 1, microbatches, average, True)
        gradients.append(reference.run(problem.phases[0], [batch]).gradients[0]["model.head.bias"])
    whole, averaged, summed = gradients
    torch.testing.assert_close(averaged, whole)
    torch.testing.assert_close(summed, 4 * whole)


def test_cases_and_problems_name_the_same_things_once() -> None:
    check_names()
    names = [case.name for case in all_cases()]
    assert len(names) == len(set(names)) >= 60


@pytest.mark.parametrize("problem", ["GPT-2", "T5"])
def test_every_schedule_and_degree_is_there(problem: str) -> None:
    places = {(c.pp, c.dp, c.schedule, c.microbatches) for c in all_cases() if c.problem == problem}
    assert places >= set(itertools.product((2, 3), (1, 2), ("simple", "interleaved"), (1, 2, 4)))
