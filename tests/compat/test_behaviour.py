"""What names of the old import path do, each in a job that is configured by its environment."""

from __future__ import annotations

import json
from pathlib import Path
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


@pytest.mark.parametrize("bf16", [False, True])
def test_sharded_parameters_say_what_they_are(bf16: bool) -> None:
    run("sharded_attributes", **_SHARDED, bf16=bf16)


@pytest.mark.parametrize("parameters", [{"partitions": 2}, {"ddp": True, "tensor_parallel_degree": 2}])
def test_files_are_saved_with_the_old_arguments(parameters: dict[str, Any]) -> None:
    run("files", **parameters)


def test_the_environment_configures_and_variables_without_effect_are_named() -> None:
    throttle = {"SMP_NCCL_THROTTLE_LIMIT": "1", "SMP_DISABLE_D2D": "1"}
    first, second = run("environment", variables=throttle, partitions=2, microbatches=3, _prescaled_batch=True)
    assert "SMP_NCCL_THROTTLE_LIMIT has no effect here: collectives under way are not limited" in first.err
    assert "SMP_DISABLE_D2D has no effect" not in first.err
    assert "has no effect" not in second.err


_ALONE: dict[str, Any] = {}
_PIPELINE = {"partitions": 2, "microbatches": 2}
_TENSOR = {"ddp": True, "tensor_parallel_degree": 2}
_SHARDED_LAYERS = {"ddp": True, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 64}


@pytest.mark.parametrize("parameters", [_ALONE, _PIPELINE, _TENSOR, {"ddp": True}, _SHARDED_LAYERS])
def test_distributed_layers_take_the_places_of_a_models_at_every_degree(
    parameters: dict[str, Any], tmp_path: Path
) -> None:
    run("fused_layers", 2 if parameters else 1, {"COMPAT_FOLDER": str(tmp_path)}, **parameters)


def test_what_switches_nothing_on_is_taken_and_said_once_on_rank_0() -> None:
    idle = {"sdp_gradient_clipping": 0.5, "sdp_hierarchical_allgather": False, "fast_mode": True, "contiguous": False}
    first, second = run("said_once", ddp=True, **idle)
    for key in idle:
        assert first.err.count(f"the configuration key '{key}' is") == 1
    said = "smp.DistributedOptimizer was given dynamic_loss_scale, dynamic_loss_args, without effect here"
    assert first.err.count(said) == 1
    assert "effect here" not in second.err


@pytest.mark.parametrize("parameters", [{}, {"bf16": True}, _SHARDED, {**_SHARDED, "bf16": True}, _SHARDED_LAYERS])
def test_groups_and_parameters_say_what_a_rank_holds(parameters: dict[str, Any]) -> None:
    run("shapes", 2 if "ddp" in parameters else 1, **parameters)


@pytest.mark.parametrize("parameters", [_ALONE, _TENSOR])
def test_what_scripts_import_for_themselves_does_what_its_name_says(parameters: dict[str, Any], tmp_path: Path) -> None:
    run("helpers", 2 if parameters else 1, {"COMPAT_FOLDER": str(tmp_path)}, **parameters)
