"""Measures the round trip of a module on another rank that does nothing, and where its time goes."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

from benches.communication.pair import ROOT, free_port

#: Less than this, in microseconds.
BARS = {"dynamic_p50_us": 250.0, "static_p50_us": 100.0}
#: Fresh jobs that each take a share, because where a process's memory lies moves all of its figures together.
JOBS = 3


def run_job(calls: int, steps: int) -> dict[str, Any]:
    """What rank 0 of a fresh job tells."""
    port = str(free_port())
    same = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    base = {**os.environ, **same, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'python'}"}
    command = [sys.executable, "-m", "benches.call.rank", str(calls), str(steps)]
    processes = [
        subprocess.Popen(
            command,
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=ROOT,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        written, _ = processes[0].communicate(timeout=120)
        if any(process.wait(10) for process in processes):
            raise SystemExit("a rank failed; see above")
    finally:
        for process in processes:
            process.kill()
    found: dict[str, Any] = json.loads(written.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench-call", description=__doc__)
    parser.add_argument("--calls", type=int, default=200, help="calls in a step")
    parser.add_argument("--steps", type=int, default=10, help="steps of a job")
    args = parser.parse_args()
    if args.calls < 1 or args.steps < 1:
        parser.error("--calls and --steps have to be 1 or more")
    jobs = []
    for number in range(JOBS):
        print(f"\rjob {number + 1}/{JOBS}", end="", file=sys.stderr, flush=True)
        jobs.append(run_job(args.calls, args.steps))
    print(file=sys.stderr)
    calls = sorted(call for job in jobs for call in job["calls"])
    p50, p99 = statistics.median(calls), calls[int(0.99 * (len(calls) - 1))]
    print(
        f"{'dynamic mode, over ' + jobs[0]['reached_by']:40}{'p50':>10}{'p99':>10}   microseconds, {len(calls)} calls"
    )
    print(f"{'round trip of an empty module':40}{p50:10.1f}{p99:10.1f}\n")
    print(f"{'where it goes (timed, so a little slower)':50}microseconds")
    for rank, who in enumerate(("rank 0, which calls", "rank 1, which serves")):
        print(who)
        for label in jobs[0]["stages"][rank]:
            print(f"  {label:44}{statistics.median(job['stages'][rank][label] for job in jobs):10.1f}")
    figures: dict[str, float | None] = {"dynamic_p50_us": p50, "static_p50_us": None}
    missed = {name: bar for name, bar in BARS.items() if (figure := figures[name]) is None or figure >= bar}
    for name, bar in missed.items():
        figure = figures[name]
        said = "cannot be measured: static mode is not built" if figure is None else f"is {figure:.1f}"
        print(f"missed: {name} {said}; the bar is below {bar:g}")
    print(json.dumps({**figures, "dynamic_p99_us": p99}), flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
