"""Runs every fault in every layout of ranks at every moment, and prints a table; see ``--help``."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter

from rich.console import Console
from rich.table import Table

from tests.faults.cases import LAYOUTS, all_cases
from tests.faults.runner import Outcome, run
from tests.soak.killed_starters import left_of

#: How long the slowest rank may take to raise where nobody has to be waited for.
SLOWEST_SECONDS = 3.0
MIN_CASES = 250
#: How often a notebook and a launcher are killed.
KILLED = 3


def main() -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("patterns", nargs="*", help="parts of names of cases; all by default")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--workers", type=int, default=3, help="how many jobs run at a time")
    given = parser.parse_args()
    cases = [case for case in all_cases() if all(pattern in case.name for pattern in given.patterns)]
    if given.list or not cases:
        print(*(case.name for case in cases), sep="\n")
        return 0
    number = 0

    def done(outcome: Outcome) -> None:
        nonlocal number
        number += 1
        text = f"{number}/{len(cases)} {outcome.case.name}"
        if outcome.is_bad:
            text += f": HUNG {outcome.hung}, INEXACT {outcome.inexact}, UNNAMED {outcome.unnamed}: {outcome.note[:600]}"
        print(text, file=sys.stderr, flush=True)

    outcomes = run(cases, given.workers, done)
    table = Table("fault", *LAYOUTS)
    for fault in dict.fromkeys(case.fault for case in cases):
        cells = []
        for layout in LAYOUTS:
            own = [one for one in outcomes if (one.case.fault, one.case.layout) == (fault, layout)]
            bad = Counter(one.is_bad for one in own)
            slowest = max((one.seconds for one in own if one.seconds is not None), default=None)
            cells.append(f"{bad[False]}/{len(own)}" + ("" if slowest is None else f" {slowest:.1f} s") if own else "")
        table.add_row(fault, *cells)
    Console(width=140).print(table)
    for one in outcomes:
        if one.is_bad:
            print(f"{one.case.name}: {one.note[:300]}")
    slowest = max(
        (one.seconds for one in outcomes if one.seconds is not None and not one.case.waits_by_contract), default=0
    )
    outlived = {} if given.patterns else left_of(KILLED)
    for name, left in outlived.items():
        print(f"{KILLED} times, a {name} is killed while its ranks train: {left} processes outlive it")
    summary = {
        "cases": len(outcomes) + KILLED * len(outlived),
        "hung": sum(one.hung for one in outcomes) + sum(outlived.values()),
        "inexact_after": sum(one.inexact for one in outcomes),
        "unnamed": sum(one.unnamed for one in outcomes),
        "slowest_s": round(slowest, 2),
    }
    print(json.dumps(summary), flush=True)
    bars = any(one.is_bad for one in outcomes) or any(outlived.values()) or slowest >= SLOWEST_SECONDS
    return 1 if bars or (not given.patterns and len(outcomes) < MIN_CASES) else 0


if __name__ == "__main__":
    sys.exit(main())
