"""Measures what communication takes from computation: threads that have nothing to do, and transfers beside tasks."""

from __future__ import annotations

import argparse
import statistics
import sys

from benches.communication.beside import COMMUNICATION_THREADS
from benches.communication.figures import IDLE_BARS, MIB, conclude
from benches.ranks import Ranks

TASK_SECONDS = 0.02
ACTIVATION_BYTES = 1 * MIB


def idle_share(shares: list[dict[str, float]]) -> float:
    """The share of a core that the communication threads of the worse rank took."""
    return max(
        sum(share for name, share in threads.items() if name.startswith(COMMUNICATION_THREADS)) for threads in shares
    )


def paired_ratios(pair: Ranks, pairs: int, tasks: int) -> list[tuple[float, float]]:
    """Pairs (seconds alone, seconds with transfers) of a step, timed in turns; the slower rank counts."""

    def step(activation_bytes: int) -> float:
        return float(max(pair.ask(do="step", tasks=tasks, activation_bytes=activation_bytes)))

    step(0), step(ACTIVATION_BYTES)
    measured = []
    for number in range(pairs):
        if number % 2:
            beside = step(ACTIVATION_BYTES)
            measured.append((step(0), beside))
        else:
            alone = step(0)
            measured.append((alone, step(ACTIVATION_BYTES)))
        print(f"\rpair {number + 1}/{pairs}", end="", file=sys.stderr)
    print(file=sys.stderr)
    return measured


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench-comm-idle", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a short run: whether it works, not what it takes")
    args = parser.parse_args()
    seconds, pairs, tasks = (1.0, 3, 5) if args.quick else (10.0, 40, 25)
    with Ranks("benches.communication.rank", "beside") as pair:
        pair.ask(do="calibrate", task_seconds=TASK_SECONDS)
        print(f"both ranks compute for {seconds:g} s without a message", file=sys.stderr)
        shares = pair.ask(limit=seconds + 30.0, do="compute_in_silence", seconds=seconds)
        measured = paired_ratios(pair, pairs, tasks)
    print(f"{'thread':20}{'rank 0':>12}{'rank 1':>12}   share of a core in {seconds:g} s without a message")
    for name in sorted({name for threads in shares for name in threads}):
        print(f"{name:20}" + "".join(f"{100 * threads.get(name, 0.0):11.3f}%" for threads in shares))
    alone, beside = (1e3 * statistics.median(column) for column in zip(*measured, strict=True))
    print(f"\n{tasks} tasks of {1e3 * TASK_SECONDS:g} ms, median of {pairs} pairs")
    print(f"alone {alone:.2f} ms, with {ACTIVATION_BYTES >> 20} MiB each way beside each task {beside:.2f} ms\n")
    figures = {
        "idle_core_share": idle_share(shares),
        "overlap_ratio": statistics.median(beside / alone for alone, beside in measured),
    }
    return conclude(figures, IDLE_BARS)


if __name__ == "__main__":
    sys.exit(main())
