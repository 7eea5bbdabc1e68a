"""One of two processes that train one of the models in one mode.

usage: python -m benches.dynamic.rank MODEL/MODE SOCKET, as a rank of a job; MODE is ``dynamic`` or ``static``
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import shardwright as smp
import torch

from benches.dynamic.models import MICROBATCHES, PROBLEMS, SEED, batch
from benches.ranks import serve


class Training:
    """What a rank can be told."""

    def __init__(self, name: str, mode: str) -> None:
        """Build the model and its optimizer."""
        self.rank = int(os.environ["RANK"])
        torch.set_num_threads(1)
        keys: dict[str, Any] = {"static_mode": True, "fast_mode": True, "static_steps": 1} if mode == "static" else {}
        smp.init(pipeline_parallel_degree=2, microbatches=MICROBATCHES, **keys)
        problem = PROBLEMS[name]
        torch.manual_seed(SEED)
        self._model: Any = smp.DistributedModel(problem.make())
        self._optimizer = smp.DistributedOptimizer(torch.optim.SGD(self._model.parameters(), lr=1e-2))
        self._batch = batch()

        @smp.step
        def step(model: Any, ids: torch.Tensor) -> torch.Tensor:
            loss = problem.loss(model, ids)
            model.backward(loss)
            return loss

        self._step: Any = step

    def step(self) -> dict[str, float]:
        """When a step began and ended here, in seconds of a clock that both ranks share, and its loss."""
        smp.barrier()
        began = time.monotonic()
        self._optimizer.zero_grad()
        loss = self._step(self._model, self._batch)
        self._optimizer.step()
        return {"began": began, "ended": time.monotonic(), "loss": float(loss.reduce_mean())}

    def sent(self) -> int:
        """How many forward requests this rank has made."""
        return int(smp.stats()["server"]["total"]["sent"]["forward"])

    def close(self) -> None:
        """Leave."""
        smp.shutdown()


def main() -> None:
    kind, address = sys.argv[1:]
    name, _, mode = kind.partition("/")
    serve(Training(name, mode), address)


if __name__ == "__main__":
    main()
