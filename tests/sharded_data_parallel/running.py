"""Jobs of tests that run cases."""

from __future__ import annotations

from typing import Any

from tests.jobs.listed import run_in_job

PIPELINE = {"pipeline_parallel_degree": 2}


def case(name: str, config: dict[str, Any] | None = None, stage: int = 3, **arguments: Any) -> dict[str, Any]:
    """A case: its name and arguments, its stage, and further keys of the configuration."""
    return {"name": name, "config": {"sdp_stage": stage, **(config or {})}, "arguments": arguments}


def run(ranks: int, *cases: dict[str, Any]) -> None:
    """Run cases in one job."""
    run_in_job("tests.sharded_data_parallel.rank", ranks, cases)
