"""Trains by Ray Train over ranks, each case in a process and a cluster of its own, beside plain PyTorch.

Progress goes to stderr, a table to stdout. The last line of the output is a JSON object: how many cases there were, how
many failed, hung, and left processes or files behind.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys

from rich.console import Console
from rich.table import Table

from tests.ray.listed import CASES
from tests.ray.running import run


def main() -> int:
    """Run all, print a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.ray", description=__doc__)
    parser.add_argument("--only", default="*", help="patterns of names, with commas, such as data-*,killed")
    patterns = parser.parse_args().only.split(",")
    chosen = list(dict.fromkeys(name for each in patterns for name in fnmatch.filter(CASES, each)))
    table = Table("case", "outcome", "seconds", "what it says", "left behind")
    found = {"failed": 0, "hung": 0, "left_behind": 0}
    for name in chosen:
        outcome = run(name)
        found["failed"] += outcome.state != "passed" or bool(outcome.left)
        found["hung"] += outcome.state == "hung"
        found["left_behind"] += len(outcome.left)
        said, left = outcome.said.strip()[-200:], ", ".join(outcome.left)
        table.add_row(name, outcome.state, f"{outcome.seconds:.0f}", said, left)
        print(f"{name}: {outcome.state} after {outcome.seconds:.0f} s: {outcome.said}", file=sys.stderr, flush=True)
        if outcome.state != "passed":
            print(outcome.output[-6000:], file=sys.stderr, flush=True)
    Console(width=160).print(table)
    print(json.dumps({"cases": len(chosen), **found}), flush=True)
    return 0 if chosen and not found["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
