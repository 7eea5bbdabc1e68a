"""A rank of a job that traces some of its steps, and prints what came of it as JSON.

usage: program.py FOLDER DEGREE
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from pathlib import Path
from typing import Any

import shardwright as smp
import torch
from shardwright.errors import ShardwrightError
from torch import nn


@smp.step
def train_step(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    loss = model(inputs).square().mean()
    model.backward(loss)
    return loss


@smp.step
def tracing_step(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    with smp.trace():
        return model(inputs).mean()


def refusal(call: Any) -> str:
    try:
        call()
    except ShardwrightError as error:
        return str(error)
    return "nothing was refused"


def main() -> None:
    folder, degree = Path(sys.argv[1]), int(sys.argv[2])
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(name)s: %(message)s")
    smp.init({"pipeline_parallel_degree": degree, "microbatches": 4})
    model = smp.DistributedModel(nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)]))

    def run(count: int) -> None:
        for _ in range(count):
            train_step(model, torch.ones(8, 16))

    run(2)
    found: dict[str, Any] = {}
    with smp.trace(folder / "some", steps={1, 3}) as traced:
        run(5)
    if traced.timeline is not None:
        found["some"] = traced.timeline.steps()
    with smp.trace() as traced:
        run(1)
        found["nested"] = refusal(lambda: smp.trace().__enter__())
    found["newest"] = smp.stats()["efficiency"]["step"]
    if traced.timeline is not None:
        found["again"] = traced.timeline.steps()
        found["summary"] = traced.timeline.summary()
    smp.trace(folder / "decorated")(run)(2)
    with contextlib.suppress(ZeroDivisionError), smp.trace(folder / "failed"):
        raise ZeroDivisionError
    found["in a step"] = refusal(lambda: tracing_step(model, torch.ones(8, 16)))
    run(1)
    found["efficiency"] = smp.stats()["efficiency"]
    found["report"] = smp.report()
    print("found:", json.dumps(found), flush=True)
    smp.shutdown()


if __name__ == "__main__":
    main()
