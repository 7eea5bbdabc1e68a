"""Runs every parity case and prints a table; see ``--help``."""

from __future__ import annotations

import sys

from .cases import all_cases, with_partitions
from .command import chosen, parser, print_names
from .job import progress_bar, run_cases
from .pairwise import pairwise
from .table import conclude, render

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
    fewest = min(outcome.forward + outcome.backward for outcome in outcomes)
    return conclude(outcomes, render(outcomes), min_remote_requests=fewest)


if __name__ == "__main__":
    sys.exit(main())
