"""A model with checkpointed modules over ranks, beside the same model without checkpoints in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from shardwright.job.runtime import Runtime
from torch import nn

from tests.frames.job import Job
from tests.state.running import MICROBATCHES, SIZES, Found, alone, compare, owners, places_of, stepped

Mark = Callable[[nn.Module], None]


def check(
    job: Job,
    model: nn.Module,
    ranks: dict[str, int],
    mark: Mark,
    settings: dict[str, Any] | None = None,
    size: str = "small",
    steps: int = 3,
    calls: int = 1,
) -> None:
    """Train on several ranks with checkpoints, and compare with one process without any, after every step."""
    torch.manual_seed(11)
    rows, width = SIZES[size]
    model = model.double()
    batches = [torch.randn(rows * MICROBATCHES, width, dtype=torch.float64) for _ in range(steps)]
    expected = alone(model, batches, calls)

    def place(module: nn.Module) -> None:
        places_of(model, ranks)(module)
        mark(module)

    def main(runtime: Runtime) -> Found:
        return stepped(model, batches, place, calls)[0]

    given = {"auto_partition": False, "default_partition": 0, "microbatches": MICROBATCHES, **(settings or {})}
    results = job.run(main, given)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    assert job.rests
    compare(expected, [found for found in results if not isinstance(found, BaseException)], owners(model, ranks))
