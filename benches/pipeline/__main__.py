"""Measures pipelines of stages that sleep, beside torch.distributed.pipelining, against each schedule's ideal."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys

from benches import beside
from benches.awake import awake
from benches.pipeline.cases import FACTORS, RANKS, SCHEDULES, UNITS_MS, CostKind, Schedule
from benches.pipeline.figures import HEADER, Row, line
from benches.ranks import Ranks

#: By milliseconds of a unit: rounds, and steps of each side in a round.
ROUNDS = {40.0: (3, 1), 5.0: (4, 2), 1.0: (5, 6)}
#: At which another commit is measured too.
BESIDE_UNITS_MS = (5.0, 1.0)
#: For a step that stalls.
LIMIT_SECONDS = 120.0


class Bench:
    """Both sides on a number of ranks."""

    def __init__(self, ours: Ranks, torch: Ranks, num_ranks: int, quick: bool) -> None:
        """Take the jobs, which the caller ends."""
        self._sides = {"ours": ours, "torch": torch}
        self._num_ranks = num_ranks
        self._quick = quick

    def rows(self, schedule: Schedule) -> list[Row]:
        """Every case of a schedule."""
        return [self._row(schedule, costs, unit_ms) for costs, unit_ms in itertools.product(FACTORS, UNITS_MS)]

    def _row(self, schedule: Schedule, costs: CostKind, unit_ms: float) -> Row:
        self._say(f"{schedule}, {costs}, {unit_ms:g} ms")
        refused, of_torch = (_configured(side, schedule, costs, unit_ms) for side in self._sides.values())
        if refused is not None:
            print(f"\n{schedule} is not measured: {refused}", file=sys.stderr)
        if of_torch is not None:
            raise SystemExit(f"torch does not have {schedule}: {of_torch}")
        with_ours = refused is None
        rounds, count = (1, 1) if self._quick else ROUNDS[unit_ms]
        names = ["ours", "torch"] if with_ours else ["torch"]
        taken: dict[str, list[float]] = {"ours": [], "torch": []}
        for number in range(rounds):
            for name in names if number % 2 == 0 else reversed(names):
                taken[name] += _seconds(self._sides[name], count)
        ideals = {
            name: side.ask(do="ideal", schedule=schedule, kind=costs, unit_ms=unit_ms)[0]
            for name, side in self._sides.items()
        }
        return Row(
            ranks=self._num_ranks,
            unit_ms=unit_ms,
            costs=costs,
            schedule=schedule,
            ours=statistics.median(taken["ours"]) if with_ours else None,
            ours_ideal=ideals["ours"],
            torch=statistics.median(taken["torch"]),
            torch_ideal=ideals["torch"],
        )

    def _say(self, what: str) -> None:
        print(f"\r{self._num_ranks} ranks: {what:50}", end="", file=sys.stderr, flush=True)


def _configured(side: Ranks, schedule: Schedule, costs: CostKind, unit_ms: float) -> str | None:
    """Build a pipeline anew and warm it up with what it will cost; or why the side has no such schedule."""
    refused, *_ = side.ask(limit=LIMIT_SECONDS, do="configure", schedule=schedule, kind=costs, unit_ms=unit_ms)
    return refused


def _seconds(side: Ranks, count: int) -> list[float]:
    """Run steps of a job, and return how long each took, from the first rank's beginning to the last one's end."""
    answers = side.ask(limit=LIMIT_SECONDS, do="steps", count=count)
    return [max(end for _, end in step) - min(begin for begin, _ in step) for step in zip(*answers, strict=True)]


def compare(commit: str, at_most: float, quick: bool) -> int:
    """Print how many times as long steps of this commit take as those of another, by schedule."""
    sides: dict[str, dict[str, str]] = {"this": {}, commit: beside.variables_of(commit)}
    ratios: dict[Schedule, list[float]] = {schedule: [] for schedule in SCHEDULES}
    print(f"{'milliseconds, medians':34}" + "".join(f"{side:>14}" for side in sides) + f"{'ratio':>10}")
    for num_ranks in RANKS:
        with awake(), contextlib.ExitStack() as stack:
            jobs = [
                stack.enter_context(Ranks("benches.pipeline.rank", "shardwright", num_ranks, environment=variables))
                for variables in sides.values()
            ]
            for schedule, costs, unit_ms in itertools.product(SCHEDULES, FACTORS, BESIDE_UNITS_MS):
                name = f"{num_ranks} ranks, {schedule}, {costs}, {unit_ms:g} ms"
                print(f"\r{name:50}", end="", file=sys.stderr, flush=True)
                for job in jobs:
                    if refused := _configured(job, schedule, costs, unit_ms):
                        raise SystemExit(f"{name}: {refused}")
                rounds, count = (1, 1) if quick else ROUNDS[unit_ms]
                taken: list[list[float]] = [[], []]
                for number in range(rounds):
                    for side in (0, 1) if number % 2 else (1, 0):
                        taken[side] += _seconds(jobs[side], count)
                ratios[schedule].append(beside.ratio(*taken))
                medians = "".join(f"{1e3 * statistics.median(each):14.2f}" for each in taken)
                print(f"{name:34}{medians}{ratios[schedule][-1]:10.3f}")
    print(file=sys.stderr)
    figures = {f"{schedule}_vs_beside": statistics.median(found) for schedule, found in ratios.items()}
    return beside.conclude(figures, at_most)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench-pipeline", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one step of each: whether it works, not how fast")
    beside.add_argument(parser)
    args = parser.parse_args()
    if args.beside:
        return compare(args.beside, args.at_most, args.quick)
    rows: list[Row] = []
    for num_ranks in RANKS:
        module = "benches.pipeline.rank"
        with awake(), Ranks(module, "shardwright", num_ranks) as ours, Ranks(module, "torch", num_ranks) as torch:
            bench = Bench(ours, torch, num_ranks, args.quick)
            for schedule in SCHEDULES:
                rows += bench.rows(schedule)
        print(file=sys.stderr)
    print(HEADER)
    for row in rows:
        print(line(row))
    print()
    failed = 0
    for row in rows:
        missed = row.missed()
        failed += len(missed)
        if missed:
            print(f"missed: {row.name}: {'; '.join(missed)}")
    print(json.dumps({"rows": [row.as_json() for row in rows], "failed": failed}), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
