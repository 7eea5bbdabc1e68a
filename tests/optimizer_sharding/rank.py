"""One rank of a job that runs cases one after another, each between ``smp.init`` and ``smp.shutdown``."""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

import shardwright as smp
import torch

from tests.optimizer_sharding import cases, refusals, saving, special


def run(case: dict[str, Any]) -> None:
    """Run a case: its function's name and arguments, and the configuration."""
    torch.set_default_dtype(getattr(torch, case.get("dtype", "float64")))
    configuration = {"microbatches": 2, "ddp": True, "shard_optimizer_state": True, **case.get("config", {})}
    smp.init(configuration)
    module = next(module for module in (cases, refusals, saving, special) if hasattr(module, case["name"]))
    getattr(module, case["name"])(**case.get("arguments", {}))
    smp.shutdown()


def main() -> None:
    for case in json.loads(sys.argv[1]):
        try:
            run(case)
        except BaseException:
            sys.stderr.write(f"case {json.dumps(case)}\n")
            traceback.print_exc()
            sys.stderr.flush()
            raise
    sys.stdout.write("all cases hold\n")


if __name__ == "__main__":
    main()
