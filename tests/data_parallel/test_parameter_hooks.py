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


@pytest.mark.parametrize(
    "config",
    [{}, {"shard_optimizer_state": True}, {"tensor_parallel_degree": 2}, shards(0), shards(6), shards(1000)],
)
def test_hooks_of_parameters(config: dict[str, Any]) -> None:
    assert all(output.endswith("all hold\n") for output in outputs_of_ranks(PROGRAM, json.dumps(config), ranks=2))
