"""Verdicts and the table of them."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import shardwright as smp

from .cases import Case

#: The bar for every error.
BAR = 1e-10


@dataclass
class Outcome:
    """What came of a case.

    Attributes:
        case: The case.
        worst: The largest relative error of any gradient, output, buffer or weight.
        distance: How far training in half precision is from float32; None for other cases.
        holding: The global ranks that hold parameters.
        forward: Forward requests that crossed between ranks.
        backward: Backward requests that crossed.
        share: The largest part of a replica's parameter bytes that one rank holds.
        body_share: The largest part of the bytes of its body.
        failures: Why it failed, if it did.
        missing: The ranks without a result, because the job ended or hung.
        errors: What ranks raised, by rank.
        typed: Whether every rank raised one of the library's own errors.
        log: The end of the job's log, where the case ended the job.
    """

    case: Case
    worst: float = math.inf
    distance: float | None = None
    holding: list[int] = field(default_factory=list)
    forward: int = 0
    backward: int = 0
    share: float = 1.0
    body_share: float = 1.0
    failures: list[str] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    typed: bool = False
    log: str = ""


def row_of_failure(case: str, error: Exception) -> dict[str, Any]:
    """What a rank writes for a case that raised there; :func:`collect` reads it."""
    return {
        "case": case,
        "error": f"{type(error).__name__}: {error}",
        "typed": isinstance(error, smp.ShardwrightError),
    }


def collect(case: Case, rows: list[dict[str, Any] | None]) -> Outcome:
    """Put the ranks' rows of a case together, and hold errors against the bar."""
    outcome = Outcome(case)
    outcome.errors = {rank: row["error"] for rank, row in enumerate(rows) if row is not None and "error" in row}
    outcome.missing = [rank for rank, row in enumerate(rows) if row is None]
    outcome.typed = all(row is not None and row.get("typed", False) for row in rows)
    outcome.failures = [f"rank {rank} raised {error}" for rank, error in outcome.errors.items()]
    if outcome.missing:
        missing = ", ".join(map(str, outcome.missing))
        outcome.failures.append(f"no result from rank {missing}: the job ended or hung")
    if outcome.failures:
        return outcome
    present = [row for row in rows if row is not None]
    outcome.worst = max(row["worst"] for row in present)
    outcome.holding = [rank for rank, row in enumerate(present) if row["parameters"]]
    outcome.forward = sum(row["forward"] for row in present)
    outcome.backward = sum(row["backward"] for row in present)
    outcome.failures = [failure for row in present for failure in row["failures"]]
    if not outcome.worst < BAR:
        where = max(present, key=lambda row: float(row["worst"]))["where"]
        outcome.failures.append(f"error {outcome.worst:.1e} at {where}; allowed is {BAR:.0e}")
    return outcome


def judge(case: Case, rows: list[dict[str, Any] | None]) -> Outcome:
    """What came of a case with a pipeline."""
    outcome = collect(case, rows)
    present = [row for row in rows if row is not None]
    if outcome.missing or outcome.errors:
        return outcome
    outcome.share = _largest_share(present, "bytes")
    outcome.body_share = _largest_share(present, "body_bytes")
    if len({rank % case.pp for rank in outcome.holding}) < 2:
        outcome.failures.append("fewer than two stages hold parameters")
    if not outcome.forward:
        outcome.failures.append("no request crossed forward")
    if not outcome.backward and case.partition is None:  # one drawn at random may cut where no gradient flows
        outcome.failures.append("no request crossed backward")
    expected = present[0]["expected_forward"]
    if expected is not None and outcome.forward != expected:
        outcome.failures.append(f"{outcome.forward} forward requests crossed, expected {expected}")
    return outcome


def _largest_share(rows: list[dict[str, Any]], key: str) -> float:
    sizes = [row[key] for row in rows if row["replica"] == 0]
    return max(sizes) / sum(sizes) if sum(sizes) else 1.0


def first_failure(outcome: Outcome) -> str | None:
    """Why a case failed, in short."""
    return outcome.failures[0] if outcome.failures else None


def render(outcomes: list[Outcome]) -> str:
    """The table as text."""
    header = ("case", "schedule", "pp", "dp", "mb", "worst error", "ranks with parameters", "forward", "backward", "")
    lines = [header] + [
        (
            ", ".join([outcome.case.problem, *outcome.case.more]),
            outcome.case.schedule,
            str(outcome.case.pp),
            str(outcome.case.dp),
            str(outcome.case.microbatches),
            f"{outcome.worst:.1e}",
            ",".join(map(str, outcome.holding)),
            str(outcome.forward),
            str(outcome.backward),
            "FAILED" if outcome.failures else "exact",
        )
        for outcome in outcomes
    ]
    return aligned(lines, {2, 3, 4, 5, 7, 8})


def aligned(lines: Sequence[Sequence[str]], numbers: Collection[int]) -> str:
    """Lines of cells in columns; those of numbers are aligned to the right."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def conclude(outcomes: list[Outcome], table: str, **figures: int) -> int:
    """Print a table, what failed, and a line of JSON; returns the exit status.

    Args:
        outcomes: What came of the cases.
        table: The table.
        figures: What the line has besides.
    """
    print(table)
    failed = [outcome for outcome in outcomes if outcome.failures]
    for outcome in failed:
        print(f"\n{outcome.case.name}:", *outcome.failures, sep="\n  ")
        if outcome.log:
            print(outcome.log)
    worst = max(outcome.worst for outcome in outcomes)
    summary = {"cases": len(outcomes), "failed": len(failed), "worst_rel_error": worst, **figures}
    print(json.dumps(summary), flush=True)
    return 1 if failed or worst >= BAR else 0
