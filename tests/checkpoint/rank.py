"""One rank of a job that runs cases one after another, each between ``smp.init`` and ``smp.shutdown``."""

from __future__ import annotations

from typing import Any

import shardwright as smp
import torch

from tests.checkpoint import attacks, exchanged, foreign, pretrained, saving, waiting
from tests.checkpoint.store import cases as stored
from tests.jobs.listed import module_with, run_listed


def run(case: dict[str, Any]) -> None:
    """Run a case: its function's name and arguments, and the configuration."""
    torch.set_num_threads(1)
    smp.init({"microbatches": 2, "ddp": True, **case.get("config", {})})
    module = module_with(case["name"], (saving, attacks, exchanged, foreign, pretrained, waiting, stored))
    getattr(module, case["name"])(**case.get("arguments", {}))
    smp.shutdown()


if __name__ == "__main__":
    run_listed(run)
