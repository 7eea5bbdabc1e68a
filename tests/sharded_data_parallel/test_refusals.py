"""What cannot work with shards is refused by name."""

from __future__ import annotations

import pytest

from tests.sharded_data_parallel.running import PIPELINE, case, run


@pytest.mark.parametrize("config", [{}, PIPELINE], ids=["whole", "pipeline"])
def test_features_that_need_whole_parameters(config: dict[str, int]) -> None:
    run(2 * config.get("pipeline_parallel_degree", 1), case("refusals", config), case("in_a_step", config))


def test_an_optimizer_of_the_parameters_before() -> None:
    run(2, case("old_parameters"))


def test_a_stage_with_too_many_parameters() -> None:
    run(4, case("too_many_live", {**PIPELINE, "sdp_max_live_parameters": 1000}))


@pytest.mark.parametrize("config", [{}, PIPELINE], ids=["whole", "pipeline"])
def test_data_that_is_assigned(config: dict[str, int]) -> None:
    run(2 * config.get("pipeline_parallel_degree", 1), case("assigned_data", config))
