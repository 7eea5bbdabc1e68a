"""Measures the round trip of a module on another rank that does nothing, and where its time goes."""

from __future__ import annotations

import argparse
import json
import statistics
import sys

from benches import beside
from benches.ranks import result_of_pair

#: Less than this: microseconds, and times as long as a tensor takes there and back.
BARS = {"dynamic_p50_us": 250.0, "static_p50_us": 100.0, "vs_ping_pong": 2.0}
#: Fresh jobs that each take a share, because where a process's memory lies moves all of its figures together.
JOBS = 3
#: Of each commit and mode, where another one is measured too.
ROUNDS = 15
MODES = ("dynamic", "static")
LIMIT_SECONDS = 120.0


def compare(commit: str, at_most: float, calls: int, steps: int) -> int:
    """Print the figures of both commits, and how many times as long a call of this one takes."""
    sides: dict[str, dict[str, str]] = {"this": {}, commit: beside.variables_of(commit)}
    found: dict[tuple[str, str], list[float]] = {}
    for number in range(ROUNDS):
        for mode in MODES:
            for side in list(sides)[:: 1 if number % 2 else -1]:
                print(f"\rround {number + 1}/{ROUNDS}, {mode}, {side:20}", end="", file=sys.stderr, flush=True)
                arguments = ["-m", "benches.call.rank", str(calls), str(steps), mode]
                job = result_of_pair(arguments, LIMIT_SECONDS, sides[side])
                found.setdefault((mode, side), []).append(
                    statistics.median(job["calls" if mode == "dynamic" else "means"])
                )
    print(file=sys.stderr)
    print(f"{'microseconds, medians':24}" + "".join(f"{side:>14}" for side in sides) + f"{'ratio':>10}")
    figures = {}
    for mode in MODES:
        ours, others = (found[mode, side] for side in sides)
        figures[f"{mode}_vs_beside"] = beside.ratio(ours, others)
        medians = "".join(f"{statistics.median(each):14.1f}" for each in (ours, others))
        print(f"{mode:24}{medians}{figures[f'{mode}_vs_beside']:10.3f}")
    return beside.conclude(figures, at_most)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench-call", description=__doc__)
    parser.add_argument("--calls", type=int, default=200, help="calls in a step")
    parser.add_argument("--steps", type=int, default=10, help="steps of a job")
    beside.add_argument(parser)
    args = parser.parse_args()
    if args.calls < 1 or args.steps < 1:
        parser.error("--calls and --steps have to be 1 or more")
    if args.beside:
        return compare(args.beside, args.at_most, args.calls, args.steps)
    jobs, static_jobs = [], []
    for number in range(JOBS):
        for mode, found in (("dynamic", jobs), ("static", static_jobs)):
            print(f"\rjob {number + 1}/{JOBS}, {mode} ", end="", file=sys.stderr, flush=True)
            arguments = ["-m", "benches.call.rank", str(args.calls), str(args.steps), mode, "stages"]
            found.append(result_of_pair(arguments, LIMIT_SECONDS))
    print(file=sys.stderr)
    calls = sorted(call for job in jobs for call in job["calls"])
    p50, p99 = statistics.median(calls), calls[int(0.99 * (len(calls) - 1))]
    print(
        f"{'dynamic mode, over ' + jobs[0]['reached_by']:40}{'p50':>10}{'p99':>10}   microseconds, {len(calls)} calls"
    )
    print(f"{'round trip of an empty module':40}{p50:10.1f}{p99:10.1f}\n")
    means = sorted(mean for job in static_jobs for mean in job["means"])
    static = statistics.median(means)
    print(
        f"{'static and fast mode':40}{'p50':>10}{'p99':>10}   microseconds, {len(means)} chains of {args.calls} calls"
    )
    print(f"{'a call with what the one before gave':40}{static:10.1f}{means[int(0.99 * (len(means) - 1))]:10.1f}\n")
    print(f"{'where it goes (timed, so a little slower)':46}{'dynamic':>10}{'static':>10}   microseconds")
    for rank, who in enumerate(("rank 0, which calls", "rank 1, which serves")):
        print(who)
        for label in jobs[0]["stages"][rank]:
            both = (statistics.median(job["stages"][rank][label] for job in mode) for mode in (jobs, static_jobs))
            print(f"  {label:44}" + "".join(f"{figure:10.1f}" for figure in both))
    ratios = [statistics.median(job["calls"]) / statistics.median(job["ping_pong"]) for job in jobs]
    figures = {"dynamic_p50_us": p50, "static_p50_us": static, "vs_ping_pong": statistics.median(ratios)}
    missed = {name: bar for name, bar in BARS.items() if figures[name] >= bar}
    for name, bar in missed.items():
        print(f"missed: {name} is {figures[name]:.1f}; the bar is below {bar:g}")
    print(json.dumps({**figures, "dynamic_p99_us": p99}), flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
