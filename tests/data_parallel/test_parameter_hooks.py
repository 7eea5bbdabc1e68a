"""Hooks of parameters see over replicas what those of plain DDP see."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.ranks import outputs_of_ranks

PROGRAM = Path(__file__).with_name("parameter_hooks.py")


def shards(threshold: int) -> dict[str, Any]:
    return {
        "sharded_data_parallel_degree": 2,
        "sdp_param_persistence_threshold": threshold,
        "sdp_gradient_clipping": 1e9,
    }


#: Configurations, and how many drawn scripts run in each.
JOBS: list[tuple[int, dict[str, Any], int]] = [
    (2, {}, 12),
    (2, {"shard_optimizer_state": True}, 12),
    (2, {"tensor_parallel_degree": 2}, 12),
    (4, {"pipeline_parallel_degree": 2}, 12),
    (2, shards(0), 6),
    (2, shards(6), 0),
    (2, shards(1000), 6),
]


@pytest.mark.parametrize(("ranks", "config", "draws"), JOBS)
def test_hooks_of_parameters(ranks: int, config: dict[str, Any], draws: int) -> None:
    outputs = outputs_of_ranks(PROGRAM, json.dumps(config), str(draws), ranks=ranks)
    assert all(output.endswith("all hold\n") for output in outputs)
