"""Runs every parity case and prints a table; see ``--help``."""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys

from .cases import all_cases, with_partitions
from .job import progress_bar, run_cases
from .table import BAR, render


def main() -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("patterns", nargs="*", help="names of cases to run, with * and ?; all by default")
    parser.add_argument("--list", action="store_true", help="only list the cases")
    parser.add_argument("--logs", action="store_true", help="show the whole log of each job with a failed case")
    parser.add_argument(
        "--partitions", nargs="+", type=int, metavar="SEED", help="run on random partitions with these seeds instead"
    )
    arguments = parser.parse_args()
    known = all_cases() if arguments.partitions is None else with_partitions(arguments.partitions)
    cases = [
        case
        for case in known
        if not arguments.patterns or any(fnmatch.fnmatch(case.name, pattern) for pattern in arguments.patterns)
    ]
    if arguments.list or not cases:
        print("\n".join(case.name for case in cases) or "no case has such a name; see --list")
        return 0 if cases else 2
    with progress_bar("parity") as progress:
        outcomes = run_cases("tests.parity.problems", cases, progress, show_logs=arguments.logs)
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
