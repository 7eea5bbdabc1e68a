"""Jobs of tests that run cases."""

from __future__ import annotations

from typing import Any

from tests.jobs.listed import run_in_job

PIPELINE = {"pipeline_parallel_degree": 2}
TENSOR = {"tensor_parallel_degree": 2}
SHARDED = {"shard_optimizer_state": True}
PARAMETERS = {
    "sharded_data_parallel_degree": 2,
    "sdp_param_persistence_threshold": 20,
    "sdp_gradient_clipping": 1e6,
}


def case(name: str, config: dict[str, Any] | None = None, **arguments: Any) -> dict[str, Any]:
    """A case: its name and arguments, and keys of the configuration."""
    return {"name": name, "config": config or {}, "arguments": arguments}


def run(ranks: int, *cases: dict[str, Any]) -> None:
    """Run cases in one job."""
    run_in_job("tests.checkpoint.rank", ranks, cases)
