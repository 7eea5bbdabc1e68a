"""Measures pipelines of stages that sleep, beside torch.distributed.pipelining, against each schedule's ideal."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys

from benches.awake import awake
from benches.pipeline.cases import FACTORS, RANKS, SCHEDULES, UNITS_MS, CostKind, Schedule
from benches.pipeline.figures import HEADER, Row, line
from benches.ranks import Ranks

#: By milliseconds of a unit: rounds, and steps of each side in a round.
ROUNDS = {40.0: (3, 1), 5.0: (4, 2), 1.0: (5, 6)}
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
        self._say(f"{schedule}: start")
        (refused, *_), (of_torch, *_) = (
            side.ask(limit=LIMIT_SECONDS, do="configure", schedule=schedule) for side in self._sides.values()
        )
        if refused is not None:
            print(f"\n{schedule} is not measured: {refused}", file=sys.stderr)
        if of_torch is not None:
            raise SystemExit(f"torch does not have {schedule}: {of_torch}")
        return [
            self._row(schedule, costs, unit_ms, refused is None)
            for costs, unit_ms in itertools.product(FACTORS, UNITS_MS)
        ]

    def _row(self, schedule: Schedule, costs: CostKind, unit_ms: float, with_ours: bool) -> Row:
        self._say(f"{schedule}, {costs}, {unit_ms:g} ms")
        rounds, count = (1, 1) if self._quick else ROUNDS[unit_ms]
        names = ["ours", "torch"] if with_ours else ["torch"]
        taken: dict[str, list[float]] = {"ours": [], "torch": []}
        for number in range(rounds):
            for name in names if number % 2 == 0 else reversed(names):
                answers = self._sides[name].ask(
                    limit=LIMIT_SECONDS, do="steps", kind=costs, unit_ms=unit_ms, count=count
                )
                for step in zip(*answers, strict=True):
                    taken[name].append(max(end for _, end in step) - min(begin for begin, _ in step))
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


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench-pipeline", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one step of each: whether it works, not how fast")
    args = parser.parse_args()
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
