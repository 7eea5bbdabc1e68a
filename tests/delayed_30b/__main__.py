"""Creates, traces and divides a GPT-2 of 30 billion parameters with delayed parameters, and prints the division."""

from __future__ import annotations

import json
import sys

from tests.delayed_30b import BATCH, NUM_DEVICES, NUM_LAYERS, SEQUENCE, WIDTH, divided


def main() -> int:
    """Print the division, what was missed, and a line of JSON; 1 if anything was missed."""
    found = divided()
    print(
        f"GPT-2, {NUM_LAYERS} layers of width {WIDTH}, over {NUM_DEVICES} pipeline ranks; batch {BATCH}, sequence "
        f"{SEQUENCE}; times of each operator measured on stand-ins\n"
    )
    print(f"{'pp_rank':>7}  {'blocks':>20}  {'parameters':>14}  {'forward s':>9}  {'cost':>6}")
    for number, rank in enumerate(found.ranks):
        blocks = ",".join(map(str, rank.layers))
        print(f"{number:>7}  {blocks:>20}  {rank.parameters:>14,}  {rank.forward_seconds:9.3f}  {rank.cost:6.4f}")
    print("\n" + "  ".join(f"{phase} {seconds:.1f} s" for phase, seconds in found.phases.items()))
    missed = found.misses()
    for miss in missed:
        print(f"missed: {miss}")
    figures = {
        "parameters": found.parameters,
        "seconds": round(sum(found.phases.values()), 2),
        "peak_bytes": found.peak_bytes,
    }
    print(json.dumps(figures))
    return int(bool(missed))


sys.exit(main())
