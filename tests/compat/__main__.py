"""Runs scripts for the original library by its import path, beside plain PyTorch; see ``--help``."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.compat import accepted
from tests.compat.interface import KEYS
from tests.compat.lookup import refused_symbols, wrong_symbols
from tests.compat.runs import RUNS, Outcome, Run, compare


def attempt(run: Run) -> Outcome:
    """Run one; what goes wrong is its outcome."""
    with tempfile.TemporaryDirectory(prefix="compat-") as folder:
        try:
            return compare(run, Path(folder))
        except (AssertionError, OSError, subprocess.SubprocessError, ValueError, LookupError) as error:
            return Outcome(run, why=str(error))


def main() -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(prog="python -m tests.compat", description=__doc__)
    parser.add_argument("patterns", nargs="*", help="runs whose names contain one of these; all by default")
    chosen = parser.parse_args().patterns
    runs = [run for run in RUNS if not chosen or any(one.lower() in run.name.lower() for one in chosen)]
    symbols, keys = wrong_symbols(), [each for key in KEYS for each in accepted.problems(key)]
    for each in (*symbols, *keys):
        print(f"compat: {each}", file=sys.stderr)
    table = Table("script", "ranks", "losses", "worst relative difference", "allowed", "seconds", "result")
    failed = 0
    for run in runs:
        began = time.monotonic()
        outcome = attempt(run)
        seconds = time.monotonic() - began
        failed += bool(outcome.why)
        print(f"compat: {run.name}: {outcome.why or 'same losses'} ({seconds:.0f} s)", file=sys.stderr)
        numbers = (str(run.ranks), str(outcome.losses), f"{outcome.worst:.1e}", f"{run.bar:.0e}", f"{seconds:.1f}")
        table.add_row(run.name, *numbers, "FAILED" if outcome.why else "same")
    Console(width=140).print(table)
    counts = {
        "scripts": len({run.script for run in runs}),
        "runs": len(runs),
        "failed": failed,
        "symbols_missing": len(symbols),
        "symbols_refused": len(refused_symbols()),
        "keys_wrong": len(keys),
        "keys_refused": len(accepted.refused()),
    }
    print(json.dumps(counts), flush=True)
    return 1 if failed or symbols or keys else 0


if __name__ == "__main__":
    sys.exit(main())
