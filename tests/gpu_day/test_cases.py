"""Cases share a job of ranks; one that fails ends its job only, and bars are judged where they can be."""

from __future__ import annotations

from pathlib import Path

from tests.gpu_day.listed import CASES, on_rank
from tests.jobs.patience import HANG_SECONDS
from tools.gpu_day.cases import run_cases
from tools.gpu_day.findings import Findings
from tools.gpu_day.options import Options


def test_a_case_that_fails_ends_its_job_and_the_rest_runs_in_a_new_one(tmp_path: Path) -> None:
    options = Options("cpu", True, None, tmp_path)
    found = {
        name: (answers, error) for name, answers, error in run_cases(on_rank, CASES, options, seconds=HANG_SECONDS)
    }
    assert list(found) == list(CASES)
    first, last = found["first"][0], found["last"][0]
    assert [answer["rank"] for answer in first] == [answer["rank"] for answer in last] == [0, 1]
    assert {answer["pid"] for answer in first}.isdisjoint(answer["pid"] for answer in last)
    assert found["fails"] == ([], "rank 1: ValueError: as planned")
    assert found["dies"][1].startswith("rank 1: ended with 3")


def test_cases_for_which_no_time_is_left_are_named(tmp_path: Path) -> None:
    options = Options("cpu", True, None, tmp_path)
    assert [(name, error) for name, _, error in run_cases(on_rank, CASES, options, seconds=0)] == [
        (name, "not run: no time was left") for name in CASES
    ]


def test_a_bar_fails_a_step_only_where_it_is_judged() -> None:
    findings = Findings()
    findings.at_most("ratio", 1.2, 1.01, judged=False)
    assert findings.result()["passed"]
    assert findings.result()["bars"]["ratio"] == {"bar": "<= 1.01", "figure": 1.2, "holds": None}
    findings.at_least("share", 0.3, 0.4, judged=True)
    result = findings.result()
    assert not result["passed"]
    assert result["failures"] == "share is 0.3; the bar is >= 0.4"
    assert result["bars"]["share"]["holds"] is False


def test_a_case_that_is_not_exact_fails_its_step() -> None:
    answer = {"error": 1e-3, "where": "gradients: weight", "wrong": "", "bitwise": False, "exact": False}
    findings = Findings()
    findings.exact("case", [answer, answer | {"exact": True}], "")
    assert findings.result()["failures"] == "case: rank 0 is off by 0.001 at gradients: weight"
    assert findings.figures == {"case_error": 1e-3, "case_bitwise": False}
