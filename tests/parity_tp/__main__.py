"""Runs the parity cases of tensor parallelism and prints a table; see ``--help``."""

from __future__ import annotations

import argparse
import sys

from tests.parity.command import chosen, print_names
from tests.parity.job import progress_bar, run_cases
from tests.parity.pairwise import pairwise
from tests.parity.table import conclude

from .cases import MODULES, cases, factors
from .table import judge, render


def main() -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity_tp", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="names of cases, with * and ?")
    parser.add_argument("--all", action="store_true", help="every problem at every place, in every mode")
    parser.add_argument("--pairwise", action="store_true", help="every problem, and every two settings together")
    parser.add_argument("--list", action="store_true", help="only list the cases")
    parser.add_argument("--logs", action="store_true", help="show the whole log of each job with a failed case")
    arguments = parser.parse_args()
    known = cases(arguments.all)
    found = chosen(pairwise(known, factors) if arguments.pairwise else known, arguments.only)
    if arguments.list or not found:
        return print_names(found)
    kind = "modules" if all(case.problem in MODULES for case in found) else "models"
    with progress_bar("parity-tp") as progress:
        outcomes = run_cases(
            kind, found, progress, program="tests.parity_tp.rank", judged=judge, show_logs=arguments.logs
        )
    return conclude(outcomes, render(outcomes))


if __name__ == "__main__":
    sys.exit(main())
