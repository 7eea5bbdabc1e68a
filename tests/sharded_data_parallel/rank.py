"""One rank of a job that runs cases one after another, each between ``smp.init`` and ``smp.shutdown``."""

from __future__ import annotations

from typing import Any

import shardwright as smp
import torch

from tests.jobs.listed import module_with, run_listed
from tests.sharded_data_parallel import cases, half, refusals, saving, units


def run(case: dict[str, Any]) -> None:
    """Run a case: its function's name and arguments, and the configuration."""
    configuration = {
        "microbatches": 2,
        "ddp": True,
        "sharded_data_parallel_degree": 2,
        "sdp_param_persistence_threshold": 20,
        "sdp_gradient_clipping": 1e6,
        **case["config"],
    }
    torch.set_default_dtype(torch.float32 if configuration.get("bf16") else torch.float64)
    module = module_with(case["name"], (cases, half, refusals, saving, units))
    if (prepare := getattr(module, f"before_{case['name']}", None)) is not None:
        prepare()
    smp.init(configuration)
    getattr(module, case["name"])(**case["arguments"])
    smp.shutdown()


if __name__ == "__main__":
    run_listed(run)
