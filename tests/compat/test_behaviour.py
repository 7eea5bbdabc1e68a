"""What names of the old import path do, each in a job that is configured by its environment."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.jobs.forked import ROOT
from tests.jobs.ranks import Ended, run_ranks

_SHARDED = {"ddp": True, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 1}


def run(case: str, ranks: int = 2, variables: dict[str, str] | None = None, **parameters: Any) -> list[Ended]:
    """Run a case on all ranks of a job."""
    environment = {"SM_HP_MP_PARAMETERS": json.dumps(parameters), **(variables or {})}
    ended = run_ranks("-m", "tests.compat.behaviour", case, ranks=ranks, folder=ROOT, environment=environment)
    for rank, (code, _, errors) in enumerate(ended):
        assert code == 0, f"rank {rank} ended with {code}:\n{errors[-4000:]}"
    return ended


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 1), (2, 4), (3, 6)])
def test_jobs_that_only_evaluate(ranks: int, microbatches: int) -> None:
    run("only_forward", ranks, partitions=ranks, microbatches=microbatches, pipeline="_only_forward")


@pytest.mark.parametrize("microbatches", [1, 4])
def test_outputs_of_steps_are_detached(microbatches: int) -> None:
    run("detached", partitions=2, microbatches=microbatches)


@pytest.mark.parametrize("optimize", ["memory", "speed"])
def test_state_dicts_of_replaced_modules_are_translated(optimize: str) -> None:
    run("translated", tensor_parallel_degree=2, ddp=True, optimize=optimize)


def test_a_hook_reduces_gradients_under_its_older_name() -> None:
    run("comm_hook", ddp=True, microbatches=2)


def test_sharded_parameters_say_what_they_are() -> None:
    run("sharded_attributes", **_SHARDED)


@pytest.mark.parametrize("parameters", [{"partitions": 2}, {"ddp": True, "tensor_parallel_degree": 2}])
def test_files_are_saved_with_the_old_arguments(parameters: dict[str, Any]) -> None:
    run("files", **parameters)


def test_the_environment_configures_and_variables_without_effect_are_named() -> None:
    throttle = {"SMP_NCCL_THROTTLE_LIMIT": "1", "SMP_DISABLE_D2D": "1"}
    first, second = run("environment", variables=throttle, partitions=2, microbatches=3, _prescaled_batch=True)
    assert "SMP_NCCL_THROTTLE_LIMIT has no effect here: collectives under way are not limited" in first.err
    assert "SMP_DISABLE_D2D has no effect" not in first.err
    assert "has no effect" not in second.err
