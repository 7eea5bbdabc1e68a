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
from tests.trainers.models import KINDS
from tests.trainers.runs import BAR, DTYPES, Report, compare, run


def main() -> int:
    """Run all, print a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.trainers", description=__doc__)
    parser.add_argument("--only", default="*", help="a pattern of names such as gpt2-pp2")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    chosen = parser.parse_args()
    plain: dict[str, Report] = {}
    failed = runs = 0
    print(f"{'run':24}{'worst relative difference':>28}{'of':>24}{'seconds':>10}  result")
    for kind in KINDS:
        for layout in LAYOUTS:
            name = f"{kind}-{layout}"
            if layout == "plain" or not fnmatch.fnmatch(name, chosen.only):
                continue
            runs += 1
            began = time.monotonic()
            try:
                if kind not in plain:
                    (plain[kind],) = run(kind, "plain", chosen.dtype)
                outcome = compare(layout, plain[kind], run(kind, layout, chosen.dtype))
                problems = list(outcome.problems)
                if not outcome.difference <= BAR:
                    problems.append(f"beyond {BAR:g}")
                figures = f"{outcome.difference:28.1e}{outcome.of:>24}"
            except (AssertionError, OSError, ValueError) as error:
                problems, figures = [str(error)], f"{'':52}"
            failed += bool(problems)
            seconds = time.monotonic() - began
            print(f"{name:24}{figures}{seconds:10.1f}  {'; '.join(problems) or 'as one process'}", flush=True)
    print(json.dumps({"runs": runs, "failed": failed}), flush=True)
    return 1 if failed or not runs else 0


if __name__ == "__main__":
    sys.exit(main())
