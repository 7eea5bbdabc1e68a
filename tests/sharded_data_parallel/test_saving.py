"""State dicts of shards are whole, and load into shards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.sharded_data_parallel.running import PIPELINE, case, run


@pytest.mark.parametrize("config", [{}, PIPELINE], ids=["whole", "pipeline"])
def test_weights(config: dict[str, int]) -> None:
    run(2 * config.get("pipeline_parallel_degree", 1), *(case("weights", config, stage) for stage in (1, 2, 3)))


@pytest.mark.parametrize("config", [{}, PIPELINE], ids=["whole", "pipeline"])
def test_optimizers(config: dict[str, int]) -> None:
    ranks = 2 * config.get("pipeline_parallel_degree", 1)
    run(ranks, *(case("optimizers", config, optimizer=each) for each in ("sgd", "adamw", "rmsprop")))


@pytest.mark.parametrize("config", [{}, PIPELINE], ids=["whole", "pipeline"])
def test_bfloat16_is_that_of_replicas(config: dict[str, int], tmp_path: Path) -> None:
    ranks, folder = 2 * config.get("pipeline_parallel_degree", 1), str(tmp_path)
    default = {"sdp_param_persistence_threshold": 1_000_000, "sdp_gradient_clipping": 1.0}
    whole = {**config, **default, "sharded_data_parallel_degree": 1, "bf16": True}
    cases = [case("trained", whole, folder=folder, label="whole")]
    cases.append(case("trained", whole, folder=folder, label="clipped whole", max_norm=0.5))
    for stage in (1, 2, 3):
        keys = {**config, "bf16": True}
        cases.append(case("trained", keys, stage, folder=folder, label=f"{stage}", saved=stage == 2))
        keys["sdp_gradient_clipping"] = 0.5
        cases.append(case("trained", keys, stage, folder=folder, label=f"clipped {stage}"))
    run(ranks, *cases)
    expected = {label: json.loads((tmp_path / label).read_text()) for label in ("whole", "clipped whole")}
    for stage in (1, 2, 3):
        plain, clipped = (json.loads((tmp_path / f"{what}{stage}").read_text()) for what in ("", "clipped "))
        if stage == 1 or config:  # else each microbatch's gradients are rounded after their reduction
            assert plain == expected["whole"]
            # Norms are sums in another order.
            for number, master in expected["clipped whole"]["masters"].items():
                torch.testing.assert_close(torch.tensor(clipped["masters"][number]), torch.tensor(master))
        for found, label in ((plain, "whole"), (clipped, "clipped whole")):
            losses = torch.tensor(found["losses"]), torch.tensor(expected[label]["losses"])
            torch.testing.assert_close(*losses, rtol=0.02, atol=0.0)
    assert expected["whole"] != expected["clipped whole"]
