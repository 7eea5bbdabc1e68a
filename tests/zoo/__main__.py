"""Trains every model of the zoo over several ranks and compares it with one process; see ``--help``."""

from __future__ import annotations

import json
import sys

from tests.parity.command import chosen, parser, print_names
from tests.parity.job import ROOT, progress_bar, run_cases
from tests.parity.table import Outcome

from .cases import all_cases, with_partitions
from .entries import ENTRIES
from .table import page, text
from .verdict import passes, summary, verdict_on

#: The module whose problems the cases name.
PROBLEMS = "tests.zoo.entries"
PAGE = ROOT / "docs" / "zoo.md"


def main() -> int:
    """Parse, run, print; the whole zoo writes its page too."""
    arguments = parser("tests.zoo", __doc__, "models or cases", pairs=False).parse_args()
    whole = not arguments.patterns and arguments.partitions is None
    known = all_cases(ENTRIES) if arguments.partitions is None else with_partitions(ENTRIES, arguments.partitions)
    cases = chosen(known, arguments.patterns, names=lambda case: (case.problem, case.name))
    if arguments.list or not cases:
        return print_names(cases)
    with progress_bar("zoo") as progress:
        outcomes = run_cases(PROBLEMS, cases, progress, complaint=_complaint, show_logs=arguments.logs)
    order = {name: number for number, name in enumerate(ENTRIES)}
    outcomes.sort(key=lambda outcome: order[outcome.case.problem])
    verdicts = [verdict_on(ENTRIES[outcome.case.problem], outcome) for outcome in outcomes]
    counts = summary(verdicts)
    print(text(ENTRIES, verdicts))
    for verdict in verdicts:
        if verdict.outcome.log:
            print(f"\n{verdict.outcome.case.name}:\n{verdict.outcome.log}")
    if whole:
        PAGE.write_text(page(ENTRIES, verdicts, counts))
    print(json.dumps(counts), flush=True)
    return 0 if passes(counts) or (not whole and not counts["wrong"] and not counts["hung"]) else 1


def _complaint(outcome: Outcome) -> str | None:
    verdict = verdict_on(ENTRIES[outcome.case.problem], outcome)
    return verdict.why[0] if verdict.word in ("wrong", "hung") else None


if __name__ == "__main__":
    sys.exit(main())
