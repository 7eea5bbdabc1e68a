"""Measures what dynamic mode loses against static mode, where the model's calls allow that too."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys

from benches.communication.figures import Bar, conclude
from benches.dynamic.models import PROBLEMS
from benches.ranks import Ranks

MODES = ("dynamic", "static")
ROUNDS = 12
#: Steps that do not count: the first divides the model, the next is recorded for static mode.
WARM_UP = 3
#: Dynamic mode's speed beside static mode's.
BARS = {name: Bar(">=", 0.95) for name in PROBLEMS}
#: Both modes train alike.
LOSS_TOLERANCE = 1e-5
LIMIT_SECONDS = 120.0


def measure(name: str, rounds: int) -> tuple[dict[str, list[float]], list[str]]:
    """Seconds of each step by mode, and what was wrong."""
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    losses: dict[str, list[float]] = {mode: [] for mode in MODES}
    with contextlib.ExitStack() as stack:
        jobs = {mode: stack.enter_context(Ranks("benches.dynamic.rank", f"{name}/{mode}")) for mode in MODES}
        for number in range(WARM_UP + rounds):
            print(f"\r{name}: round {number + 1} ", end="", file=sys.stderr, flush=True)
            for mode in MODES if number % 2 == 0 else reversed(MODES):
                answers = jobs[mode].ask(limit=LIMIT_SECONDS, do="step")
                losses[mode].append(answers[0]["loss"])
                if number >= WARM_UP:
                    seconds[mode].append(max(a["ended"] for a in answers) - min(a["began"] for a in answers))
        wrong = [
            f"wrong: {name} in {mode} mode sent no request to another rank"
            for mode in MODES
            if not any(jobs[mode].ask(do="sent"))
        ]
    print(file=sys.stderr)
    for step, (one, other) in enumerate(zip(*losses.values(), strict=True), 1):
        if not abs(one - other) <= LOSS_TOLERANCE * abs(one):
            wrong.append(
                f"wrong: {name} has a loss of {one:.7f} in dynamic and {other:.7f} in static mode, step {step}"
            )
    return seconds, wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench-dynamic", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two rounds: whether it works, not how fast")
    args = parser.parse_args()
    figures: dict[str, float | None] = {}
    mistakes: list[str] = []
    lines = [f"{'model':20}{'dynamic s/step':>16}{'static s/step':>16}{'static/dynamic':>16}"]
    for name in PROBLEMS:
        seconds, wrong = measure(name, 2 if args.quick else ROUNDS)
        mistakes += wrong
        ratio = statistics.median(b / a for a, b in zip(seconds["dynamic"], seconds["static"], strict=True))
        figures[name] = ratio
        medians = [statistics.median(seconds[mode]) for mode in MODES]
        lines.append(f"{name:20}{medians[0]:16.3f}{medians[1]:16.3f}{ratio:16.3f}")
    print("\n".join([*lines, "", *mistakes]))
    missed = conclude(figures, BARS)
    return 1 if missed or mistakes else 0


if __name__ == "__main__":
    sys.exit(main())
