"""Whether a checkpoint is ever torn: ranks killed while they save, full disks, and files that are damaged.

usage: python -m tests.torn [--kills 200] [--disks 40] [--damages 400] [--seed TEXT]

A table, and a last line of JSON. The exit code is 1 when a newest checkpoint did not load as one of the two states that
were saved, or when a damaged file was not named and refused. A seed repeats the choices, not the moments.
Killed processes do not show what a machine that loses its power would: what they wrote is in the kernel's memory.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from tests.torn.damages import damages
from tests.torn.endings import full_disks, kills


def main() -> int:
    """Run all three; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--disks", type=int, default=40, help="of each kind of a full disk")
    parser.add_argument("--damages", type=int, default=400)
    parser.add_argument("--seed", default=str(random.randrange(10**9)))
    given = parser.parse_args()
    # A fork has none of the threads that torch would wait for.
    torch.set_num_threads(1)
    print(f"seed {given.seed}", flush=True)
    torn: list[str] = []
    undetected: list[str] = []
    with tempfile.TemporaryDirectory(prefix="shardwright-torn-") as scratch:
        (Path(scratch) / "disks").mkdir()
        rows = {
            "killed": kills(Path(scratch) / "kills", given.kills, given.seed, torn),
            "full disk": full_disks(Path(scratch) / "disks", given.disks, given.seed, torn),
            "damaged": damages(Path(scratch) / "damages", given.damages, given.seed, undetected),
        }
    table = Table("what", "outcome", "times")
    for what, outcomes in rows.items():
        for outcome, times in sorted(outcomes.items()):
            table.add_row(what, outcome, str(times))
    Console().print(table)
    for problem in (*torn, *undetected):
        print(problem)
    print(json.dumps({"kills": rows["killed"].total(), "torn": len(torn), "undetected": len(undetected)}))
    tried = rows["killed"].total() >= given.kills and rows["full disk"].total() > given.disks
    return 1 if torn or undetected or not tried else 0


if __name__ == "__main__":
    sys.exit(main())
