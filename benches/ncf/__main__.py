"""Measures neural collaborative filtering over two tp ranks with different batches, beside the same batch on both,
one process and DDP."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from typing import Any

from benches.communication.figures import Bar, conclude
from benches.ranks import Ranks

#: Configurations and their ranks.
SIDES = {"different": 2, "same": 2, "one": 1, "ddp": 2}
TOTALS = (512, 4096)
USERS = 318133
ROUNDS = 9
STEPS = 10
LIMIT_SECONDS = 300.0
#: Of losses, relative, over the steps before those that count.
TOLERANCE = 1e-4
BARS = {
    "vs_same_batch": Bar(">=", 1.4),
    "vs_one_process": Bar(">=", 1.4),
    "table_bytes_ratio": Bar("<=", 0.5),
}

Seconds = dict[str, list[float]]


def disagreements(losses: dict[str, list[float]]) -> list[str]:
    """A sentence for each configuration whose losses are not those of one process."""
    right = losses["one"]
    return [
        f"wrong: {name} has losses {found} instead of {right}"
        for name, found in losses.items()
        if any(not abs(a - b) <= TOLERANCE * abs(b) for a, b in zip(found, right, strict=True))
    ]


def mean_losses(answers: list[dict[str, Any]]) -> list[float]:
    """Of each step, the mean over ranks."""
    return [statistics.mean(of) for of in zip(*(answer["losses"] for answer in answers), strict=True)]


def times_as_fast(one: list[float], than: list[float]) -> float:
    """How many times as fast one is as another: the median over rounds."""
    return statistics.median(b / a for a, b in zip(one, than, strict=True))


def measure(users: int, rounds: int) -> tuple[dict[int, Seconds], dict[str, list[dict[str, int]]], list[str]]:
    """Seconds by total batch and configuration, memory of the ranks of each, and what was wrong."""
    seconds: dict[int, Seconds] = {total: {name: [] for name in SIDES} for total in TOTALS}
    first: dict[str, Any] = {"do": "steps", "total": 64, "number": 3, "seed": 1}
    losses: dict[str, list[float]] = {}
    memory: dict[str, list[dict[str, int]]] = {}
    with Ranks("benches.ncf.rank", f"different,{users}", num_ranks=4) as job:
        job.ask(limit=LIMIT_SECONDS, do="build")
        losses["different, degree 4"] = mean_losses(job.ask(limit=LIMIT_SECONDS, **first))
        memory["different, degree 4"] = job.ask(do="memory")
    with contextlib.ExitStack() as stack:
        jobs = {
            name: stack.enter_context(Ranks("benches.ncf.rank", f"{name},{users}", num_ranks=number))
            for name, number in SIDES.items()
        }
        for name, job in jobs.items():
            job.ask(limit=LIMIT_SECONDS, do="build")
            losses[name] = mean_losses(job.ask(limit=LIMIT_SECONDS, **first))
        for total in TOTALS:
            for number in range(-1, rounds):
                for name in SIDES if number % 2 else reversed(SIDES):
                    print(f"\rbatch {total}, round {number + 1}: {name:10}", end="", file=sys.stderr, flush=True)
                    answers = jobs[name].ask(
                        limit=LIMIT_SECONDS, do="steps", total=total, number=STEPS, seed=2 + number
                    )
                    if number >= 0:
                        last, begin = (f(a[k] for a in answers) for f, k in ((max, "ended"), (min, "began")))
                        seconds[total][name].append((last - begin) / STEPS)
        for name, job in jobs.items():
            memory[name] = job.ask(do="memory")
    print(file=sys.stderr)
    return seconds, memory, disagreements(losses)


def main() -> int:
    """Measure, print, and say whether the bars are met."""
    parser = argparse.ArgumentParser(prog="make bench-ncf", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two rounds: whether it works, not how fast")
    parser.add_argument("--users", type=int, default=USERS, help=f"rows of the largest tables, by default {USERS}")
    args = parser.parse_args()
    seconds, memory, wrong = measure(args.users, 2 if args.quick else ROUNDS)
    columns = "".join(f"{f'samples/s, {total}':>18}" for total in TOTALS)
    print(f"{'configuration':24}{columns}{'table MB/rank':>16}{'peak MB/rank':>16}")
    for name, of_ranks in memory.items():
        speeds = [
            total / statistics.median(seconds[total][name]) if name in seconds[total] else None for total in TOTALS
        ]
        told = "".join(f"{'-' if one is None else format(one, '.0f'):>18}" for one in speeds)
        tables, peak = (max(one[key] for one in of_ranks) / 1e6 for key in ("tables", "peak"))
        print(f"{name:24}{told}{tables:16.0f}{peak:16.0f}")
    print("\n".join(["", *wrong]))
    large = seconds[TOTALS[-1]]
    figures: dict[str, float | None] = {
        "vs_same_batch": times_as_fast(large["different"], large["same"]),
        "vs_one_process": times_as_fast(large["different"], large["one"]),
        "table_bytes_ratio": max(one["tables"] for one in memory["different"]) / memory["one"][0]["tables"],
    }
    missed = conclude(figures, BARS)
    return 1 if missed or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
