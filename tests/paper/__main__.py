"""Starts the paper's large configurations, reduced in width and depth, and prints what each trained with."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.jobs.group import Group

from .configurations import CONFIGURATIONS, Configuration

ROOT = Path(__file__).resolve().parents[2]
#: Of one configuration: 48 processes share the processors.
SECONDS = 3000.0


def run(of: Configuration) -> dict[str, Any]:
    """Run one; what its ranks saw, or how the job ended."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as output:
        began = time.monotonic()
        job = Group(["-m", "tests.paper.rank", of.name, folder], of.ranks, output=output, folder=ROOT)
        try:
            code = job.wait(SECONDS)
        except subprocess.TimeoutExpired:
            job.kill()
            code = -1
        output.seek(0)
        text = output.read()
        found = [Path(folder, f"{rank}.json") for rank in range(of.ranks)]
        ranks = [json.loads(path.read_text()) for path in found if path.exists()]
    return {"code": code, "seconds": time.monotonic() - began, "ranks": ranks, "output": text}


def misses(of: Configuration, result: dict[str, Any]) -> list[str]:
    """What is wrong with a run."""
    ranks = result["ranks"]
    if result["code"] != 0 or len(ranks) != of.ranks:
        return [f"the job ended with {result['code']}:\n{result['output'][-60_000:]}"]
    found = []
    for rank, seen in enumerate(ranks):
        first, last = seen["losses"]
        if not (math.isfinite(first) and last < first):
            found.append(f"rank {rank}: the loss went from {first} to {last}")
        if not 0 < seen["parameters"] < seen["whole"]:
            found.append(f"rank {rank} holds {seen['parameters']} of {seen['whole']} parameters")
        if seen["replaced"] == 0:
            found.append(f"rank {rank}: no layer was divided")
    return found


def main() -> int:
    """Run all, print a table and a line of JSON; 1 if any missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="configurations whose name contains this")
    wanted = parser.parse_args().only
    rows, failed = [], 0
    print(f"{'':14}{'section':>8}{'ranks':>7}{'loss':>9}{'':>9}{'peak MiB':>10}{'seconds':>9}")
    for of in CONFIGURATIONS:
        if wanted not in of.name:
            continue
        print(f"{of.name}: {of.ranks} ranks, {of.keys}", file=sys.stderr, flush=True)
        result = run(of)
        missed = misses(of, result)
        failed += bool(missed)
        if not missed:
            first, last = result["ranks"][0]["losses"]
            peak = max(seen["memory"]["peak"] for seen in result["ranks"]) >> 20
            print(f"{of.name:14}{of.section:>8}{of.ranks:7}{first:9.4f}{last:9.4f}{peak:10}{result['seconds']:9.0f}")
        for miss in missed:
            print(f"{of.name}: {miss}")
        rows.append({"name": of.name, "ranks": of.ranks, "keys": of.keys, "seconds": round(result["seconds"])})
    print(json.dumps({"configurations": rows, "failed": failed}))
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
