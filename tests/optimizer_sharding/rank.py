"""One rank of a job that runs cases one after another, each between ``smp.init`` and ``smp.shutdown``."""

from __future__ import annotations

from typing import Any

import shardwright as smp
import torch

from tests.jobs.listed import module_with, run_listed
from tests.optimizer_sharding import cases, refusals, saving, special


def run(case: dict[str, Any]) -> None:
    """Run a case: its function's name and arguments, and the configuration."""
    torch.set_default_dtype(getattr(torch, case.get("dtype", "float64")))
    configuration = {"microbatches": 2, "ddp": True, "shard_optimizer_state": True, **case.get("config", {})}
    smp.init(configuration)
    module = module_with(case["name"], (cases, refusals, saving, special))
    getattr(module, case["name"])(**case.get("arguments", {}))
    smp.shutdown()


if __name__ == "__main__":
    run_listed(run)
