"""Measures generation over two ranks beside one process, which has one thread as each rank has."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

from benches.generate.models import BATCH, MICROBATCHES
from benches.ranks import ROOT, result_of_pair

#: At least so many times as many tokens per second as one process, where stages sleep.
SPEED_BAR = 1.5
#: At most so many times the growth of a token's cost with the length that one process has.
GROWTH_BAR = 1.15
#: A rank's caches are within this of its share.
SHARE_BAR = 0.02
LIMIT_SECONDS = 900.0


def alone(kind: str, tokens: int) -> dict[str, Any]:
    """The figures of one process."""
    base = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'python'}"}
    command = [sys.executable, "-m", "benches.generate.rank", kind, "1", str(tokens), "alone"]
    written = subprocess.check_output(command, env=base, cwd=ROOT, text=True, timeout=LIMIT_SECONDS)
    found: dict[str, Any] = json.loads(written.splitlines()[-1])
    return found


def measured(kind: str, microbatches: int, tokens: int, rounds: int) -> tuple[list[Any], list[Any]]:
    """The figures of one process and of two ranks, in turns."""
    ones, pairs = [], []
    for number in range(rounds):
        print(f"\r{kind}, round {number + 1}/{rounds} ", end="", file=sys.stderr, flush=True)
        ones.append(alone(kind, tokens))
        arguments = ["-m", "benches.generate.rank", kind, str(microbatches), str(tokens)]
        pairs.append(result_of_pair(arguments, LIMIT_SECONDS))
    print(file=sys.stderr)
    return ones, pairs


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench-generate", description=__doc__)
    parser.add_argument("--tokens", type=int, default=256, help="new tokens of each sequence")
    parser.add_argument("--rounds", type=int, default=3, help="fresh processes of each kind")
    args = parser.parse_args()
    if args.tokens < 16 or args.rounds < 1:
        parser.error("--tokens has to be 16 or more, and --rounds 1 or more")
    print(f"{'tokens per second, medians':40}{'one process':>14}{'two ranks':>14}{'ratio':>8}")
    ratios: dict[str, float] = {}
    shares: list[float] = []
    equal, growth = True, 0.0
    for kind, microbatches, label in (
        ("sleeping", MICROBATCHES, f"stages that sleep, {MICROBATCHES} microbatches"),
        ("gpt2", 2, "GPT-2, 2 microbatches"),  # the last: all of its tokens are begun in the order of their lengths
    ):
        ones, pairs = measured(kind, microbatches, args.tokens, args.rounds)
        speeds = [statistics.median(BATCH * args.tokens / one["seconds"] for one in side) for side in (ones, pairs)]
        ratios[kind] = statistics.median(
            one["seconds"] / pair["seconds"] for one, pair in zip(ones, pairs, strict=True)
        )
        growth = statistics.median(pair["growth"] / one["growth"] for one, pair in zip(ones, pairs, strict=True))
        shares += [share for pair in pairs for share in pair["shares"]]
        equal &= len({one["tokens"] for one in (*ones, *pairs)}) == 1
        busy = [statistics.median(1e3 * one["computed"] / args.tokens for one in side) for side in (ones, pairs)]
        print(f"{label:40}{speeds[0]:14.1f}{speeds[1]:14.1f}{ratios[kind]:8.3f}")
        print(f"{'  ms of processor a token, the busier rank':40}{busy[0]:14.2f}{busy[1]:14.2f}")
    share = max(shares, key=lambda one: abs(one - 1))
    holds = {
        f"vs_one_process is {ratios['sleeping']:.3f}; the bar is at least {SPEED_BAR}": ratios["sleeping"] >= SPEED_BAR,
        f"growth_vs_one_process is {growth:.3f}; the bar is {GROWTH_BAR}": growth <= GROWTH_BAR,
        f"cache_vs_share is {share:.4f}; the bar is 1 to within {SHARE_BAR}": abs(share - 1) <= SHARE_BAR,
        "tokens_equal is false": equal,
    }
    for said in [said for said, held in holds.items() if not held]:
        print(f"missed: {said}")
    figures = {
        "vs_one_process": ratios["sleeping"],
        "gpt2_vs_one_process": ratios["gpt2"],
        "growth_vs_one_process": growth,
        "cache_vs_share": share,
        "tokens_equal": equal,
        "tokens": args.tokens,
    }
    print(json.dumps(figures), flush=True)
    return 0 if all(holds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
