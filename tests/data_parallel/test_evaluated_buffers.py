"""Replicas start steps from the first one's buffers, in evaluations after training too."""

import json
from pathlib import Path

import pytest

from tests.jobs.ranks import outputs_of_ranks


@pytest.mark.parametrize(
    ("ranks", "config"),
    [(2, {"ddp": True}), (4, {"ddp": True, "pipeline_parallel_degree": 2})],
    ids=["two replicas", "two pipelines"],
)
def test_steps_start_from_the_buffers_that_torch_gives_them(ranks: int, config: dict[str, object]) -> None:
    outputs = outputs_of_ranks(Path(__file__).with_name("evaluated_buffers.py"), json.dumps(config), ranks=ranks)
    assert all("buffers are shared" in output for output in outputs)
