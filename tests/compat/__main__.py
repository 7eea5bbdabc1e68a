"""Runs scripts for the original library by its import path, beside plain PyTorch; see ``--help``."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from tests.compat import accepted
from tests.compat.cells import CELLS
from tests.compat.cells.running import problems
from tests.compat.cells.table import reasons
from tests.compat.interface import KEYS
from tests.compat.lookup import refused_symbols, wrong_symbols
from tests.compat.published.runs import BARS, EXAMPLES, Compared
from tests.compat.published.runs import compare as compare_example
from tests.compat.runs import RUNS, Outcome, compare

#: A script, and what came of it.
One = TypeVar("One")
Came = TypeVar("Came")
_FAILURES = (AssertionError, OSError, subprocess.SubprocessError, ValueError, LookupError)


def attempt(what: One, compare_one: Callable[[One, Path], Came], failed: Callable[..., Came]) -> Came:
    """Run one script; what goes wrong is what came of it."""
    with tempfile.TemporaryDirectory(prefix="compat-") as folder:
        try:
            return compare_one(what, Path(folder))
        except _FAILURES as error:
            return failed(what, why=str(error))


def wrong_cells() -> int:
    """Run the table of keys and arguments, say what is wrong and why cells are refused, and count what is wrong."""
    began, wrong = time.monotonic(), 0
    for cell, why in problems(CELLS):
        wrong += 1
        print(f"compat: {cell}: {why}", file=sys.stderr)
    outcomes = Counter(cell.outcome for cell in CELLS)
    table = Table(
        f"{len(CELLS)} cells in {time.monotonic() - began:.0f} s: {dict(outcomes)}; refused because of", "cells"
    )
    for words, number in reasons().most_common():
        table.add_row(words, str(number))
    Console(width=140, stderr=True).print(table)
    return wrong


def main() -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(prog="python -m tests.compat", description=__doc__)
    parser.add_argument("patterns", nargs="*", help="runs whose names contain one of these, or cells; all by default")
    chosen = parser.parse_args().patterns
    runs = [run for run in RUNS if _is_chosen(run.name, chosen)]
    examples = [one for one in EXAMPLES if _is_chosen(one.name, chosen)]
    symbols, keys = wrong_symbols(), [each for key in KEYS for each in accepted.problems(key)]
    for each in (*symbols, *keys):
        print(f"compat: {each}", file=sys.stderr)
    table = Table("script", "ranks", "losses", "worst relative difference", "allowed", "seconds", "result")
    failed = 0
    for run in runs:
        began = time.monotonic()
        outcome = attempt(run, compare, Outcome)
        seconds = time.monotonic() - began
        failed += bool(outcome.why)
        print(f"compat: {run.name}: {outcome.why or 'same losses'} ({seconds:.0f} s)", file=sys.stderr)
        numbers = (str(run.ranks), str(outcome.losses), f"{outcome.worst:.1e}", f"{run.bar:.0e}", f"{seconds:.1f}")
        table.add_row(run.name, *numbers, "FAILED" if outcome.why else "same")
    for example in examples:
        began = time.monotonic()
        compared = attempt(example, compare_example, Compared)
        seconds = time.monotonic() - began
        failed += bool(compared.why)
        print(f"compat: {example.name}: {compared.why or 'same losses'} ({seconds:.0f} s)", file=sys.stderr)
        numbers = (str(example.ranks), "", f"{compared.worst:.1e}", f"{BARS[example.dtype]:.0e}", f"{seconds:.1f}")
        table.add_row(f"as published: {example.name}", *numbers, "FAILED" if compared.why else "same")
    Console(width=140).print(table)
    with_cells = not chosen or "cells" in chosen
    cells_failed = wrong_cells() if with_cells else 0
    counts = {
        "scripts": len({run.script for run in runs} | {one.model for one in examples}),
        "runs": len(runs) + len(examples),
        "failed": failed + cells_failed,
        "symbols_missing": len(symbols),
        "symbols_refused": len(refused_symbols()),
        "keys_wrong": len(keys),
        "keys_refused": len(accepted.refused()),
        "cells": len(CELLS) if with_cells else 0,
        "cells_refused": sum(reasons().values()) if with_cells else 0,
    }
    print(json.dumps(counts), flush=True)
    return 1 if counts["failed"] or symbols or keys else 0


def _is_chosen(name: str, chosen: list[str]) -> bool:
    return not chosen or any(one.lower() in name.lower() for one in chosen)


if __name__ == "__main__":
    sys.exit(main())
