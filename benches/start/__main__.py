"""Measures what a user waits for before the second step: imports, ``smp.init`` of two ranks, and the first step."""

from __future__ import annotations

import argparse
import subprocess
import sys

from rich.console import Console

from benches.communication.figures import conclude
from benches.ranks import ROOT, Ranks
from benches.start.figures import BARS, Measured, figures, table

RUNS = 7
STEPS = 2
#: Before the runs that count: files are read from the disk, and Python writes what it compiled.
WARM_UP = 1
LIMIT_SECONDS = 300.0
_IMPORTS = """
import time
began = time.perf_counter()
import torch
between = time.perf_counter()
import shardwright
print(between - began, time.perf_counter() - between)
"""


def _measure_import(measured: Measured) -> None:
    """Both imports in a fresh process."""
    result = subprocess.run([sys.executable, "-c", _IMPORTS], cwd=ROOT, capture_output=True, text=True, check=True)
    torch, ours = map(float, result.stdout.split())
    measured.torch_import.append(torch)
    measured.our_import.append(ours)


def _measure_job(measured: Measured) -> None:
    """A job of two ranks, and one process beside it that computes while the ranks sleep."""
    with Ranks("benches.start.rank", "plain", num_ranks=1) as plain, Ranks("benches.start.rank", "ours") as ours:
        for job in (plain, ours):
            job.ask(limit=LIMIT_SECONDS, do="load")
        measured.init.append(max(ours.ask(limit=LIMIT_SECONDS, do="init")))
        for job in (plain, ours):
            job.ask(limit=LIMIT_SECONDS, do="build")
        measured.plain_steps.append([])
        measured.our_steps.append([])
        for _ in range(STEPS):
            (alone,) = plain.ask(limit=LIMIT_SECONDS, do="step")
            answers = ours.ask(limit=LIMIT_SECONDS, do="step")
            measured.plain_steps[-1].append(alone["ended"] - alone["began"])
            measured.our_steps[-1].append(max(a["ended"] for a in answers) - min(a["began"] for a in answers))
            if any(abs(answer["loss"] - alone["loss"]) > 1e-4 for answer in answers):
                raise SystemExit(
                    f"the losses differ: {alone['loss']} in one process, {answers[0]['loss']} on two ranks"
                )
        measured.phases.append(ours.ask(do="phases")[0])


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench-start", description=__doc__)
    parser.add_argument("--runs", type=int, default=RUNS, help="runs that count")
    args = parser.parse_args()
    if args.runs < 1:
        parser.error("--runs has to be 1 or more")
    if sys.dont_write_bytecode:
        print("PYTHONDONTWRITEBYTECODE is set: imports compile every file again", file=sys.stderr)
    measured = Measured()
    for number in range(-WARM_UP, args.runs):
        kept = measured if number >= 0 else Measured()
        what = f"run {number + 1}/{args.runs}" if number >= 0 else "warm up"
        print(f"\r{what}: import{'':20}", end="", file=sys.stderr, flush=True)
        _measure_import(kept)
        print(f"\r{what}: job{'':20}", end="", file=sys.stderr, flush=True)
        _measure_job(kept)
    print(file=sys.stderr)
    Console(width=100).print(table(measured))
    return 1 if conclude(figures(measured), BARS) else 0


if __name__ == "__main__":
    sys.exit(main())
