"""Verdicts, and the table of them. Needs no torch."""

from __future__ import annotations

from typing import Any

from tests.parity.cases import Case
from tests.parity.table import Outcome, aligned, collect

from .cases import KINDS, DividedCase, HalfCase, feature_of


def judge(case: Case, rows: list[dict[str, Any] | None]) -> Outcome:
    """What came of a case: exact, requests crossed, and the feature had its effect."""
    outcome = collect(case, rows)
    present = [row for row in rows if row is not None]
    if outcome.missing or outcome.errors:
        return outcome
    if case.pp > 1 and not (outcome.forward and outcome.backward):
        outcome.failures.append(f"{outcome.forward} requests crossed forward and {outcome.backward} backward")
    assert isinstance(case, KINDS), "all are"
    why = feature_of(case).failure(case, present)
    if why is not None:
        outcome.failures.append(why)
    outcome.distance = max((row["distance"] for row in present if "distance" in row), default=None)
    return outcome


def render(outcomes: list[Outcome]) -> str:
    """The table as text."""
    lines = [
        (
            *("feature", "how", "problem", "schedule", "pp", "tp", "dp", "mb"),
            *("worst error", "from float32", "forward", "backward", ""),
        )
    ]
    for outcome in outcomes:
        case = outcome.case
        assert isinstance(case, KINDS), "all are"
        tp = case.tp if isinstance(case, DividedCase | HalfCase) else 1
        lines.append(
            (
                case.feature,
                ", ".join([case.how, *(part for part in case.more if part != case.how)]),
                case.problem,
                case.schedule,
                str(case.pp),
                str(tp),
                str(case.dp),
                str(case.microbatches),
                f"{outcome.worst:.1e}",
                "" if outcome.distance is None else f"{outcome.distance:.1e}",
                str(outcome.forward),
                str(outcome.backward),
                "FAILED" if outcome.failures else "exact",
            )
        )
    return aligned(lines, {4, 5, 6, 7, 8, 9, 10, 11})
