"""Runs the parity cases of features that save memory and prints a table; see ``--help``."""

from __future__ import annotations

import sys

from tests.covering import covering
from tests.parity.command import chosen, parser, print_names
from tests.parity.job import progress_bar, run_cases
from tests.parity.pairwise import pairwise
from tests.parity.table import conclude

from .cases import KINDS, all_cases, factors, few
from .table import judge, render


def main() -> int:
    """Parse, run, print."""
    options = parser("tests.parity_memory", __doc__, "names of cases", partitions=False)
    options.add_argument("--few", action="store_true", help="every way of every feature, schedule and kind of job once")
    arguments = options.parse_args()
    known = all_cases()
    if arguments.few:
        known = covering(known, few)
    cases = chosen(pairwise(known, factors) if arguments.pairwise else known, arguments.patterns)
    if arguments.list or not cases:
        return print_names(cases)
    outcomes = []
    with progress_bar("parity-memory") as progress:
        for kind in KINDS:
            some = [case for case in cases if isinstance(case, kind)]
            outcomes += run_cases(
                kind.__name__,
                some,
                progress,
                program="tests.parity_memory.rank",
                judged=judge,
                show_logs=arguments.logs,
            )
    return conclude(outcomes, render(outcomes))


if __name__ == "__main__":
    sys.exit(main())
