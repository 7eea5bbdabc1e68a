"""Training with shards is that of plain PyTorch in one process; `tests/parity_memory` has larger models."""

from __future__ import annotations

import pytest

from tests.optimizer_sharding.problems import OPTIMIZERS
from tests.sharded_data_parallel.running import PIPELINE, case, run

STAGES = (1, 2, 3)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_optimizer(ranks: int) -> None:
    run(ranks, *(case("parity", stage=1 + n % 3, optimizer=each, steps=3) for n, each in enumerate(OPTIMIZERS)))


@pytest.mark.parametrize("stage", STAGES)
def test_few_and_special_parameters(stage: int) -> None:
    models = ("odd", "large", "tied", "experts")
    run(2, *(case("parity", stage=stage, model=model) for model in models))
    three = {"sharded_data_parallel_degree": 3, "sdp_param_persistence_threshold": 1}
    run(3, *(case("parity", three, stage, model=model) for model in ("tiny", "odd", "tied", "large")))


def test_three_ranks_and_pipelines_of_odd_modules() -> None:
    for config in ({"deterministic_server": True}, {"static_mode": True, "static_steps": 2}, {"pipeline": "simple"}):
        run(4, *(case("parity", {**PIPELINE, **config}, stage, model="large", steps=5) for stage in (1, 3)))


@pytest.mark.parametrize("config", [{}, PIPELINE], ids=["whole", "pipeline"])
def test_what_scripts_do(config: dict[str, int]) -> None:
    ranks = 2 * config.get("pipeline_parallel_degree", 1)
    names = ("norms", "accumulation", "closures", "evaluations", "weighted", "hooks", "hooks_before", "averaged")
    run(ranks, *(case(name, config, stage) for name in names for stage in ((3,) if config else STAGES)))
    run(ranks, case("clipped", {**config, "sdp_gradient_clipping": 0.05}, max_norm=0.05), case("two_models", config))


def test_first_calls_and_scalers() -> None:
    run(2, *(case(name, stage=stage) for name in ("inference_first", "generated", "scaled") for stage in STAGES))
    run(4, case("inference_first", PIPELINE), case("scaled", PIPELINE))


def test_replicas_use_different_parameters() -> None:
    run(2, *(case("used_by_some", stage=stage) for stage in STAGES))
    run(4, case("used_by_some", stage=2))


@pytest.mark.parametrize("stage", STAGES)
def test_a_failed_step_is_undone(stage: int) -> None:
    run(2, case("failures", stage=stage), case("failing_forward", stage=stage))
    run(4, case("failures", PIPELINE, stage))


@pytest.mark.parametrize("stage", STAGES)
def test_units_are_checkpointed_together(stage: int) -> None:
    run(2, *(case("checkpointed", stage=stage, strategy=strategy) for strategy in ("contiguous", "group_2")))


def test_memory_is_that_of_shards() -> None:
    run(2, *(case("memory", stage=stage) for stage in STAGES))
    run(4, case("memory", PIPELINE))


def test_parameters_are_gathered_by_way_of_hosts() -> None:
    four = {"sharded_data_parallel_degree": 4}
    run(4, *(case("two_levels", four, stage) for stage in STAGES))
    run(4, case("two_levels", {**four, "sdp_hierarchical_allgather": False}, used=False))
