"""Optimizer state on a disk over real ranks: exact, with less memory, and a full disk that is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.listed import run_in_job
from tests.jobs.ranks import outputs_of_ranks, run_ranks

HERE = Path(__file__).parent
PIPELINE = {"pipeline_parallel_degree": 2}
REPLICAS = {"ddp": True}
SHARDED_STATE = {"ddp": True, "shard_optimizer_state": True}
SHARDED = {"ddp": True, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 1000}


def case(config: dict[str, Any], optimizer: str = "adamw", dtype: str = "float64", **more: Any) -> dict[str, Any]:
    about = {"where": "disk", "streams": None, **more}
    name = f"{config} {optimizer} {dtype} {more}"
    return {"name": name, "config": config, "optimizer": optimizer, "dtype": dtype, **about}


def through_a_device(*arguments: Any, where: Any = True) -> dict[str, Any]:
    """A case whose state passes through a device, for which streams that run late stand."""
    return case(*arguments, where=where, streams="late")


def run(ranks: int, *cases: dict[str, Any]) -> None:
    run_in_job("tests.optimizer_offloading.rank", ranks, cases)


def test_a_pipeline_and_replicas() -> None:
    run(2, case(PIPELINE), case(PIPELINE, "sgd"), case(REPLICAS, "nadam"), case(PIPELINE, "adagrad"))


def test_three_stages() -> None:
    run(3, case({"pipeline_parallel_degree": 3}, "rmsprop"), case(SHARDED_STATE, "sgd"))


def test_shards() -> None:
    run(2, case(SHARDED_STATE), case(SHARDED_STATE, "adagrad"), case(SHARDED), case(SHARDED | {"sdp_stage": 1}, "sgd"))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_master_weights(dtype: str) -> None:
    half = {dtype: True}
    run(
        2,
        case(PIPELINE | half, dtype=dtype),
        case(REPLICAS | half, "sgd", dtype),
        case(SHARDED_STATE | half, dtype=dtype),
    )


def test_a_pipeline_with_shards_in_bf16() -> None:
    run(4, case(PIPELINE | SHARDED_STATE | {"bf16": True}, dtype="bf16"), case(PIPELINE | SHARDED))


def test_state_passes_through_devices() -> None:
    run(
        2,
        through_a_device(PIPELINE),
        through_a_device(SHARDED_STATE, "adagrad", where="disk"),
        through_a_device(SHARDED, "sgd"),
        through_a_device(PIPELINE | {"bf16": True}, "adamw", "bf16"),
        through_a_device(SHARDED_STATE | {"fp16": True}, "adamw", "fp16", where="disk"),
        through_a_device(SHARDED | {"bf16": True}, "adamw", "bf16"),
    )


def found_by(program: str, *arguments: str, ranks: int = 1) -> list[dict[str, Any]]:
    outputs = outputs_of_ranks(HERE / program, *arguments, ranks=ranks)
    lines = [line for output in outputs for line in output.splitlines() if line.startswith("found: ")]
    return [json.loads(line.removeprefix("found: ")) for line in lines]


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_memory_falls_by_the_state_and_a_step_needs_two_chunks(dtype: str) -> None:
    (alone,), (streamed,) = found_by("resident.py", "false", dtype), found_by("resident.py", "disk", dtype)
    assert alone["digest"] == streamed["digest"]
    state, chunk = alone["state_bytes"], streamed["chunk_bytes"]
    assert streamed["offloaded_bytes"] >= 0.99 * state
    assert alone["resident"] - streamed["resident"] >= 0.9 * state, (alone, streamed)
    # Beside two chunks: what PyTorch computes a chunk with, and the gradients of master weights.
    assert streamed["peak"] - streamed["before_step"] <= 6 * chunk + streamed["gradient_bytes"], streamed
    assert streamed["first_peak"] <= alone["first_peak"] - 0.7 * state, (alone, streamed)


def test_a_full_disk_is_named() -> None:
    (found,) = found_by("full.py")
    assert found["kind"] == "OffloadError"
    for part in ("rank 0 could not set aside 1048576 bytes of the optimizer's state in its file in ", "File too large"):
        assert part in found["text"]


def test_host_memory_and_directories_in_memory_save_nothing_on_cpu_ranks_and_say_so() -> None:
    for keys, said in (
        (
            {"offload_optimizer": True},
            "offloads the optimizer's state to the same memory, which saves nothing: set \"off",
        ),
        ({"offload_optimizer": "disk", "offload_directory": "/dev/shm"}, "/dev/shm, which is in memory too and saves"),
    ):
        (ended,) = run_ranks(HERE / "warned.py", json.dumps(keys), ranks=1)
        assert ended.code == 0, ended.err
        assert said in ended.err
        assert f"streamed: {keys['offload_optimizer'] == 'disk'}" in ended.out
