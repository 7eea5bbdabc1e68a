"""Trains by the trainers of other libraries over ranks, and holds them to their plain use in one process.

The last line of the output is a JSON object with the number of runs and of those that failed.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import time

from tests.trainers.layouts import LAYOUTS
from tests.trainers.models import KINDS, ORIGINAL
from tests.trainers.runs import (
    BAR,
    DTYPES,
    LIGHTNING,
    ROUNDING,
    Report,
    accelerated,
    compare,
    compare_lightning,
    run,
)


def main() -> int:
    """Run all, print a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.trainers", description=__doc__)
    parser.add_argument("--only", default="*", help="a pattern of names such as gpt2-pp2")
    chosen = parser.parse_args()
    plain: dict[tuple[str, str], Report] = {}
    failed = runs = 0
    print(f"{'run':24}{'dtype':>9}{'worst relative difference':>28}{'of':>24}{'seconds':>10}  result")
    cases = [(kind, layout) for kind in (*KINDS, *ORIGINAL) for layout in LAYOUTS if layout != "plain"]
    by_lightning = [
        (f"{LIGHTNING}{kind}", layout) for kind in ("gpt2", "vit") for layout in LAYOUTS if layout != "plain"
    ]
    for kind, layout in [*cases, *by_lightning, ("accelerate", "pp2"), ("accelerate", "pp2xdp2")]:
        name = f"{kind}-{layout}"
        if not fnmatch.fnmatch(name, chosen.only):
            continue
        runs += 1
        for dtype in DTYPES:
            problems, is_rounding = _row(name, kind, layout, dtype, plain)
            if not is_rounding:
                break
        failed += bool(problems)
    print(json.dumps({"runs": runs, "failed": failed}), flush=True)
    return 1 if failed or not runs else 0


def _row(name: str, kind: str, layout: str, dtype: str, plain: dict[tuple[str, str], Report]) -> tuple[list[str], bool]:
    """Run one, print a line; return what is wrong, and whether it may be the rounding of float32."""
    began, is_rounding = time.monotonic(), False
    try:
        if kind == "accelerate":
            outcome = accelerated(layout)
        else:
            if (kind, dtype) not in plain:
                (plain[kind, dtype],) = run(kind, "plain", dtype)
            compared = compare_lightning if kind.startswith(LIGHTNING) else compare
            outcome = compared(layout, plain[kind, dtype], run(kind, layout, dtype))
        problems, figures = list(outcome.problems), f"{outcome.difference:28.1e}{outcome.of:>24}"
        if not outcome.difference <= BAR:
            problems.append(f"beyond {BAR:g}")
            is_rounding = (
                kind != "accelerate" and dtype == "float32" and outcome.difference < ROUNDING and not outcome.problems
            )
    except (AssertionError, OSError, ValueError) as error:
        problems, figures = [str(error)], f"{'':52}"
    said = "; ".join(problems) or "as one process"
    said += ": rounding of float32? Again in float64" if is_rounding else ""
    print(f"{name:24}{dtype:>9}{figures}{time.monotonic() - began:10.1f}  {said}", flush=True)
    return problems, is_rounding


if __name__ == "__main__":
    sys.exit(main())
