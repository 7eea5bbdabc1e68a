"""Saves under every layout, loads under every other, and prints a table; see ``--help``."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from tests.parity.cases import Case
from tests.parity.command import chosen, parser, print_names
from tests.parity.job import progress_bar, run_cases
from tests.parity.table import Outcome, aligned, collect

from .cases import LoadCase, SaveCase, load_cases, save_cases


def judge(case: Case, rows: list[dict[str, Any] | None]) -> Outcome:
    """What came of a case: exact, and the stages of a pipeline had something to do."""
    outcome = collect(case, rows)
    if not outcome.failures and case.pp > 1 and not (outcome.forward and outcome.backward and len(outcome.holding) > 1):
        outcome.failures.append(f"{outcome.forward} requests crossed forward and {outcome.backward} backward")
    return outcome


def run(cases: Sequence[LoadCase], show_logs: bool) -> tuple[list[Outcome], list[Outcome]]:
    """Save what the cases load, and load it; what came of both."""
    wanted = {(case.problem, case.source) for case in cases}
    saves = [case for case in save_cases() if (case.problem, case.layout) in wanted]
    outcomes: list[list[Outcome]] = []
    every: tuple[Sequence[SaveCase], ...] = (saves, cases)
    with tempfile.TemporaryDirectory(prefix="checkpoint-layouts-") as folder, progress_bar("checkpoint") as progress:
        for some in every:
            outcomes.append(
                run_cases(
                    folder,
                    some,
                    progress,
                    program="tests.checkpoint.layouts.rank",
                    judged=judge,
                    show_logs=show_logs,
                )
            )
    saved, loaded = outcomes
    return saved, loaded


def main() -> int:
    """Parse, run, print."""
    options = parser("tests.checkpoint.layouts", __doc__, "names of pairs", partitions=False, pairs=False)
    arguments = options.parse_args()
    cases = [case for case in chosen(load_cases(), arguments.patterns) if isinstance(case, LoadCase)]
    if arguments.list or not cases:
        return print_names(cases)
    saved, loaded = run(cases, arguments.logs)
    lines: list[Sequence[str]] = [("model", "saved under", "loaded under", "worst error", "")]
    for outcome in loaded:
        case = outcome.case
        assert isinstance(case, LoadCase), "all are"
        verdict = "FAILED" if outcome.failures else "exact"
        lines.append((case.problem, case.source, case.layout, f"{outcome.worst:.1e}", verdict))
    print(aligned(lines, {3}))
    failed = [outcome for outcome in (*saved, *loaded) if outcome.failures]
    for outcome in failed:
        print(f"\n{outcome.case.name}:", *outcome.failures, sep="\n  ")
        if outcome.log:
            print(outcome.log)
    missing = len(cases) - len(loaded)
    print(json.dumps({"pairs": len(loaded), "failed": len(failed), "missing": missing}), flush=True)
    return 1 if failed or missing else 0


if __name__ == "__main__":
    sys.exit(main())
