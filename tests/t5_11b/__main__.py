"""Divides T5-11B as in the paper's appendix D and prints the tables beside the paper's figures."""

from __future__ import annotations

import json
import sys
import time

from tests.t5_11b import BATCH, DECODER_LENGTH, ENCODER_LENGTH, EXAMPLES, NUM_DEVICES, divided


def main() -> int:
    """Print the tables, what was missed, and a line of JSON; 1 if anything was missed."""
    began = time.perf_counter()
    divisions = divided()
    seconds = time.perf_counter() - began
    missed: list[str] = []
    print(
        f"T5-11B on the meta device over {NUM_DEVICES} pipeline ranks; batch {BATCH}, encoder {ENCODER_LENGTH}, "
        f"decoder {DECODER_LENGTH} (the paper gives no lengths); computation by number of modules"
    )
    for example, division in zip(EXAMPLES, divisions, strict=True):
        print(f"\nalpha {example.alpha}")
        print(f"{'module':<28}  {'cost':>6}  pp_rank")
        for name, cost, rank in division.rows:
            print(f"{name:<28}  {cost:6.4f}  {rank:>7}")
        print(f"{'':<28}  {'ours':>14}  {'paper':>14}")
        for name, ours, paper in zip(
            ("encoder's ranks", "decoder's ranks"), division.split, example.split, strict=True
        ):
            print(f"{name:<28}  {ours:>14}  {paper:>14}")
        ours, paper = (f"{min(of):.3f} to {max(of):.3f}" for of in (division.costs, example.paper))
        print(f"{'cost of a rank':<28}  {ours:>14}  {paper:>14}")
        print("by rank: " + "  ".join(f"{cost:.3f}" for cost in division.costs))
        missed += [f"alpha {example.alpha}: {miss}" for miss in division.misses(example)]
    for miss in missed:
        print(f"missed: {miss}")
    one, other = divisions
    figures = {
        "alpha_1": list(one.split),
        "alpha_02": list(other.split),
        "largest_1": round(max(one.costs), 4),
        "largest_02": round(max(other.costs), 4),
        "seconds": round(seconds, 2),
    }
    print(json.dumps(figures))
    return int(bool(missed))


sys.exit(main())
