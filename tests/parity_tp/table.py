"""Verdicts under tensor parallelism, and the table of them. Needs no torch."""

from __future__ import annotations

from typing import Any

from tests.parity.cases import Case
from tests.parity.table import Outcome, aligned, collect

from .cases import SILENT, TensorCase


def judge(case: Case, rows: list[dict[str, Any] | None]) -> Outcome:
    """What came of a case: with a pipeline, each stage has to hold parameters, and requests to cross both ways."""
    outcome = collect(case, rows)
    present = [row for row in rows if row is not None]
    if outcome.missing or outcome.errors:
        return outcome
    if case.problem not in SILENT and not any(row["collectives"] for row in present):
        outcome.failures.append("no collective ran between tp ranks")
    if case.pp == 1:
        return outcome
    if len({row["stage"] for row in present if row["parameters"]}) < case.pp:
        outcome.failures.append("a stage holds no parameters")
    if not outcome.forward or not outcome.backward:
        outcome.failures.append(f"{outcome.forward} requests crossed forward and {outcome.backward} backward")
    return outcome


def render(outcomes: list[Outcome]) -> str:
    """The table as text."""
    lines = [("case", "pp", "tp", "dp", "optimize", "batches", "worst error", "forward", "backward", "")]
    for outcome in outcomes:
        case = outcome.case
        assert isinstance(case, TensorCase), "all are"
        lines.append(
            (
                case.problem + (", delayed" if case.delayed else ""),
                str(case.pp),
                str(case.tp),
                str(case.dp),
                case.optimize,
                case.batches,
                f"{outcome.worst:.1e}",
                str(outcome.forward),
                str(outcome.backward),
                "FAILED" if outcome.failures else "exact",
            )
        )
    return aligned(lines, {1, 2, 3, 7, 8})
