"""A step that is refused leaves nothing behind that the next one would stumble over."""

from __future__ import annotations

from typing import Any

import shardwright as smp
import torch
from shardwright.errors import FrameError, RemoteError
from shardwright.runtime import Runtime
from torch import nn

from tests.frames.job import Job, in_process_ranks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.here, self.there = nn.Linear(3, 3), nn.Linear(3, 3)
        smp.set_partition(self.there, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.there(self.here(x))


def test_the_next_model_trains_after_a_first_step_that_was_refused() -> None:
    def main(runtime: Runtime) -> Any:
        refused, model = smp.DistributedModel(Model()), smp.DistributedModel(Model())

        @smp.step
        def wrong(x: torch.Tensor) -> None:
            torch.autograd.grad(refused(x).sum(), [x])

        @smp.step
        def right(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).sum()
            model.backward(loss)
            return loss

        try:
            wrong(torch.ones(4, 3, requires_grad=True))
        except (FrameError, RemoteError) as error:
            return error, right(torch.ones(4, 3)).outputs
        return None

    with in_process_ranks():
        job = Job(2)
        try:
            results = job.run(main, {"microbatches": 2, "auto_partition": False, "default_partition": 0})
            assert job.sent()["forward"] == 2
        finally:
            job.close()
    for result in results:
        assert isinstance(result, tuple), result
        error, losses = result
        assert "torch.autograd.grad in the code of the step function" in str(error)
        assert len(losses) == 2
