"""The zoo's judgement, and that its members are what they must be."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.parity.cases import Case
from tests.parity.rows import usual_row
from tests.parity.table import Outcome, judge

from . import schedules
from .cases import all_cases, with_partitions
from .entries import ENTRIES
from .entry import Entry
from .table import page, text
from .verdict import MIN_MODELS, Verdict, passes, summary, verdict_on

NAME = "Qwen3"
CASE = Case(NAME, 2, 1, "simple", 2, steps=3)
REFUSED = Entry(problem=ENTRIES[NAME].problem, kind="module", reason="because", refused="use the other way")
row = functools.partial(usual_row, CASE)


def judged(*rows: dict[str, Any] | None, entry: Entry = ENTRIES[NAME]) -> str:
    return verdict_on(entry, judge(CASE, list(rows))).word


def test_a_model_that_equals_one_process_is_exact() -> None:
    assert judged(row(), row()) == "exact"


@pytest.mark.parametrize(
    "changed", [{"bytes": 99}, {"body_bytes": 99}, {"worst": 1e-9}, {"error": "ValueError: no"}, {"forward": 0}]
)
def test_what_breaks_a_rule_is_wrong(changed: dict[str, Any]) -> None:
    other = {"forward": 0} if "forward" in changed else {}
    assert judged(row(**changed), row(**other)) == "wrong"


def test_a_rank_without_a_result_hung() -> None:
    assert judged(row(), None) == "hung"


def test_a_refusal_is_a_typed_error_on_every_rank_that_says_what_to_change() -> None:
    good = row(error="PartitionError: cannot; use the other way", typed=True)
    assert judged(good, good, entry=REFUSED) == "refused"
    assert judged(good, row(error="PartitionError: cannot", typed=True), entry=REFUSED) == "wrong"
    assert judged(good, row(error="KeyError: use the other way", typed=False), entry=REFUSED) == "wrong"
    assert judged(good, row(), entry=REFUSED) == "wrong"
    assert judged(row(), row(), entry=REFUSED) == "wrong"
    assert judged(good, good) == "wrong"


def test_an_entry_counts_by_its_worst_verdict() -> None:
    counts = summary([Verdict("wrong", Outcome(CASE)), Verdict("exact", Outcome(CASE))])
    assert counts == {"models": 1, "exact": 0, "refused": 0, "wrong": 1, "hung": 0}


def test_the_whole_passes_only_without_wrong_ones_and_with_enough_models() -> None:
    good = {"models": MIN_MODELS, "exact": MIN_MODELS - 5, "refused": 5, "wrong": 0, "hung": 0}
    assert passes(good)
    for changed in ({"models": MIN_MODELS - 1}, {"refused": 6}, {"wrong": 1}, {"hung": 1}):
        assert not passes(good | changed)


def test_the_tables_name_every_model_and_what_is_to_be_said() -> None:
    verdicts = [Verdict("wrong", Outcome(CASE), ("this is wrong",))]
    assert "this is wrong" in text(ENTRIES, verdicts)
    written = page(ENTRIES, verdicts, summary(verdicts))
    assert all(f"| {name} |" in written for name in ENTRIES)


def test_every_model_runs_on_its_degrees_and_some_on_random_partitions() -> None:
    cases = all_cases(ENTRIES)
    assert len({case.name for case in cases}) == len(cases)
    for name, entry in ENTRIES.items():
        assert {case.pp for case in cases if case.problem == name and case.partition is None} == set(entry.depths)
    assert any(case.partition is not None for case in cases)
    assert {case.problem for case in with_partitions(ENTRIES, [9])} == {
        name for name, entry in ENTRIES.items() if entry.refused is None
    }


def test_half_of_the_zoo_has_every_family_under_every_schedule_in_every_mode() -> None:
    cases = schedules.all_cases(ENTRIES)
    assert len({case.name for case in cases}) == len(cases)
    names = {case.problem for case in cases}
    assert {ENTRIES[name].kind for name in names} == {entry.kind for entry in ENTRIES.values()}
    assert len(ENTRIES) * 0.45 < len(names) < len(ENTRIES) * 0.6
    assert len(cases) == len(names) * len(schedules.SCHEDULES) * len(schedules.MODES)
    assert {case.schedule for case in cases} >= {"list", "auto", "program.csv", "program.txt"}


def test_the_table_of_schedules_has_a_line_for_each_model_and_says_what_is_wrong() -> None:
    cases = [Case(NAME, 2, 1, schedule, 4, steps=3) for schedule in ("simple", "program.csv")]
    verdicts = [Verdict("exact", Outcome(cases[0], worst=0.0)), Verdict("wrong", Outcome(cases[1]))]
    header, line = schedules.table(verdicts).splitlines()
    assert header.split()[-len(schedules.SCHEDULES) :] == list(schedules.SCHEDULES)
    assert line.split()[-2:] == ["0", "wrong"]
