"""Runs every parity case and prints a table; see ``--help``."""

from __future__ import annotations

import json
import sys

from .cases import all_cases, with_partitions
from .command import chosen, parser, print_names
from .job import progress_bar, run_cases
from .pairwise import pairwise
from .table import BAR, render

#: The module whose problems the cases name.
PROBLEMS = "tests.parity.problems"


def main() -> int:
    """Parse, run, print."""
    arguments = parser("tests.parity", __doc__, "names of cases").parse_args()
    known = all_cases() if arguments.partitions is None else with_partitions(arguments.partitions)
    cases = chosen(pairwise(known) if arguments.pairwise else known, arguments.patterns)
    if arguments.list or not cases:
        return print_names(cases)
    with progress_bar("parity") as progress:
        outcomes = run_cases(PROBLEMS, cases, progress, show_logs=arguments.logs)
    print(render(outcomes))
    failed = [outcome for outcome in outcomes if outcome.failures]
    for outcome in failed:
        print(f"\n{outcome.case.name}:", *outcome.failures, sep="\n  ")
        if outcome.log:
            print(outcome.log)
    summary = {
        "cases": len(outcomes),
        "failed": len(failed),
        "worst_rel_error": max(outcome.worst for outcome in outcomes),
        "min_remote_requests": min(outcome.forward + outcome.backward for outcome in outcomes),
    }
    print(json.dumps(summary), flush=True)
    return 1 if failed or summary["worst_rel_error"] >= BAR else 0


if __name__ == "__main__":
    sys.exit(main())
