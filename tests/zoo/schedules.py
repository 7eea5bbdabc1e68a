"""Trains half of the zoo on two ranks under every schedule and compares it with one process; see ``--help``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tests.parity.cases import Case
from tests.parity.command import chosen, parser, print_names
from tests.parity.job import progress_bar, run_cases
from tests.parity.table import Outcome

from .cases import MICROBATCHES, STEPS
from .entries import ENTRIES
from .entry import Entry
from .verdict import Verdict, verdict_on

#: Every schedule, each a column of the table; of two programs an entry runs one.
SCHEDULES = ("simple", "interleaved", "looped", "zero_bubble", "list", "program", "auto")
#: Further ways to run each schedule: configuration keys by name.
MODES: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "static": {"static_mode": True, "fast_mode": True, "static_steps": 1},
}
_PROGRAMS = ("program.csv", "program.txt")
#: The first step divides the model, three are on trial, and two run with what was chosen.
_AUTO_STEPS = 6
_DEGREE = 2


def half_of_the_zoo(entries: Mapping[str, Entry]) -> list[str]:
    """Of each kind every second entry, from its first one on; what is refused has no schedule."""
    found = []
    for kind in dict.fromkeys(entry.kind for entry in entries.values()):
        names = [name for name, entry in entries.items() if entry.kind == kind and entry.refused is None]
        found += names[::2]
    return found


def all_cases(entries: Mapping[str, Entry], modes: Mapping[str, Mapping[str, Any]] = MODES) -> list[Case]:
    """Every chosen entry under every schedule in every mode."""
    return [
        Case(
            name,
            _DEGREE,
            1,
            _PROGRAMS[number % len(_PROGRAMS)] if schedule == "program" else schedule,
            MICROBATCHES,
            keys=tuple(keys.items()),
            steps=_AUTO_STEPS if schedule == "auto" else STEPS,
        )
        for number, name in enumerate(half_of_the_zoo(entries))
        for keys in modes.values()
        for schedule in SCHEDULES
    ]


def table(verdicts: Sequence[Verdict]) -> str:
    """A line for each model and mode, a column for each schedule: the worst relative error, or the verdict."""
    header = ("model", "kind", "mode", *SCHEDULES)
    modes = {tuple(keys.items()): mode for mode, keys in MODES.items()}
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for verdict in verdicts:
        case = verdict.outcome.case
        schedule = "program" if case.schedule in _PROGRAMS else case.schedule
        cell = f"{verdict.outcome.worst:.0e}" if verdict.outcome.worst else "0"
        mode = modes[tuple((key, value) for key, value in case.keys)]
        lines.setdefault((case.problem, mode), {})[schedule] = cell if verdict.word == "exact" else verdict.word
    rows = [header]
    for (name, mode), cells in lines.items():
        rows.append((name, ENTRIES[name].kind, mode, *(cells.get(schedule, "") for schedule in SCHEDULES)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def main() -> int:
    """Parse, run, print; the last line counts cases and failures."""
    arguments = parser("tests.zoo.schedules", __doc__, "models or cases", partitions=False, pairs=False).parse_args()
    cases = chosen(all_cases(ENTRIES), arguments.patterns, names=lambda case: (case.problem, case.name))
    if arguments.list or not cases:
        return print_names(cases)
    with progress_bar("zoo, schedules") as progress:
        outcomes = run_cases("tests.zoo.entries", cases, progress, complaint=_complaint, show_logs=arguments.logs)
    verdicts = [verdict_on(ENTRIES[outcome.case.problem], outcome) for outcome in outcomes]
    print(table(verdicts))
    failed = [verdict for verdict in verdicts if verdict.word != "exact"]
    for verdict in failed:
        print("\n  ".join((f"\n{verdict.outcome.case.name}, {verdict.word}:", *verdict.why)))
        if verdict.outcome.log:
            print(verdict.outcome.log)
    print(json.dumps({"cases": len(verdicts), "failed": len(failed)}), flush=True)
    return 1 if failed else 0


def _complaint(outcome: Outcome) -> str | None:
    verdict = verdict_on(ENTRIES[outcome.case.problem], outcome)
    return None if verdict.word == "exact" else next(iter(verdict.why), verdict.word)


if __name__ == "__main__":
    sys.exit(main())
