"""Whose gradients are reduced is decided once for an accumulation: drawn scripts train as in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.ranks import outputs_of_ranks

PROGRAM = Path(__file__).with_name("who_takes_part.py")
PIPELINE = {"pipeline_parallel_degree": 2}
SHARDS = {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 1e9}


@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        (2, {}),
        (2, {"shard_optimizer_state": True}),
        (2, {"tensor_parallel_degree": 2}),
        (2, SHARDS),
        (4, PIPELINE),
        pytest.param(4, {**PIPELINE, "shard_optimizer_state": True}, marks=pytest.mark.slow),
        pytest.param(4, {**PIPELINE, **SHARDS}, marks=pytest.mark.slow),
    ],
    ids=["replicas", "shares", "tensor", "shards", "pipeline", "pipeline-shares", "pipeline-shards"],
)
def test_what_is_frozen_or_replaced_between_passes(ranks: int, config: dict[str, Any]) -> None:
    outputs = outputs_of_ranks(PROGRAM, json.dumps(config), "20", ranks=ranks)
    assert all(output.endswith("all hold\n") for output in outputs)
