"""Runs every module that keeps something as the ranks of a job, in processes; writes what was wrong as JSON.

usage: keepers_program.py MODE, as one of the ranks
"""

from __future__ import annotations

import json
import sys

import shardwright as smp
import torch
from shardwright.execution.state_order import StateOrder
from shardwright.job.runtime import current_runtime

from tests.state.keepers import KEEPERS
from tests.state.running import MICROBATCHES, MODES, SIZES, STEPS, alone, compare, owners, places_of, stepped
from tests.state.settings import Settings, torch_settings
from tests.state.test_keepers import PLACES, Chain
from tests.state.test_order import DataDependentLoop
from tests.state.test_put_back import Around


def main(mode: str) -> None:
    """Compare all of them, one model after another."""
    given = {"auto_partition": False, "default_partition": 0, "microbatches": MICROBATCHES, **MODES[mode]}
    smp.init({"pipeline_parallel_degree": 2, "ddp": False, **given})
    runtime, settings = current_runtime(), torch_settings()
    checked, wrong = 0, []
    for size, (rows, width) in SIZES.items():
        torch.manual_seed(5)  # the same models on all ranks
        models = [(keeper.__name__, Chain(width, [keeper]), ranks) for keeper in KEEPERS for ranks in PLACES.values()]
        models += [("loop", DataDependentLoop(width), {"child": 1, "norm": rank}) for rank in (0, 1)]
        models.append(("settings", Around(width, Settings(width)), {"inner.child": 1}))
        for name, model, ranks in models:
            model = model.double()
            torch.manual_seed(11)
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.5 / width**0.5)
            batches = [torch.randn(rows * MICROBATCHES, width, dtype=torch.float64) for _ in range(STEPS)]
            runtime.add(StateOrder())
            found, _ = stepped(model, batches, places_of(model, ranks))
            expected = alone(model, batches)
            owner = owners(model, ranks)
            mine = [{key: step[key] for key in step if owned(key, owner) == runtime.place.rank} for step in expected]
            checked += 1
            try:
                compare(mine, [found] * runtime.place.pp_size, owner)
            except AssertionError as error:
                wrong.append(f"{name}, {size}, {ranks}: {error}"[:300])
    if torch_settings() != settings:
        wrong.append(f"settings are left changed: {torch_settings()}")
    print(json.dumps({"checked": checked, "wrong": wrong}))


def owned(key: str, owner: dict[str, int]) -> int:
    """The rank that finds a value."""
    return owner.get(key.removesuffix(".grad").rpartition(".")[0], 0)


if __name__ == "__main__":
    main(sys.argv[1])
