"""Trains every model of the zoo over several ranks and compares it with one process; see ``--help``."""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys

from tests.parity.job import ROOT, progress_bar, run_cases
from tests.parity.table import Outcome

from .cases import all_cases, with_partitions
from .entries import ENTRIES
from .table import page, text
from .verdict import passes, summary, verdict_on

PAGE = ROOT / "docs" / "zoo.md"


def main() -> int:
    """Parse, run, print; the whole zoo writes its page too."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("patterns", nargs="*", help="models or cases to run, with * and ?; all by default")
    parser.add_argument("--list", action="store_true", help="only list the cases")
    parser.add_argument("--logs", action="store_true", help="show the whole log of each job with a failed case")
    parser.add_argument(
        "--partitions", nargs="+", type=int, metavar="SEED", help="run on random partitions with these seeds instead"
    )
    arguments = parser.parse_args()
    whole = not arguments.patterns and arguments.partitions is None
    known = all_cases(ENTRIES) if arguments.partitions is None else with_partitions(ENTRIES, arguments.partitions)
    cases = [
        case
        for case in known
        if not arguments.patterns
        or any(fnmatch.fnmatch(name, pattern) for pattern in arguments.patterns for name in (case.problem, case.name))
    ]
    if arguments.list or not cases:
        print("\n".join(case.name for case in cases) or "no case has such a name; see --list")
        return 0 if cases else 2
    with progress_bar("zoo") as progress:
        outcomes = run_cases("tests.zoo.entries", cases, progress, complaint=_complaint, show_logs=arguments.logs)
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
