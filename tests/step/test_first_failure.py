"""A first step that fails undoes what its tasks did, and not what dividing the model did."""

from __future__ import annotations

import pytest
import shardwright as smp
import torch
from shardwright.job.runtime import Runtime
from torch import nn

from tests.frames.job import Job, in_process_ranks


class Counted(nn.Linear):
    """A layer that counts its calls."""

    def __init__(self) -> None:
        super().__init__(2, 2, dtype=torch.float64)
        self.register_buffer("count", torch.zeros(1, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().forward(inputs)


@smp.step(microbatches=2)
def stepped(model: smp.DistributedModel, inputs: torch.Tensor, fails: bool) -> torch.Tensor:
    loss = model(inputs).square().mean()
    model.backward(loss)
    if fails:
        raise ValueError("on purpose")
    return loss


def test_a_first_step_that_fails_leaves_buffers_as_a_hook_of_the_division_has_made_them() -> None:
    def main(runtime: Runtime) -> tuple[float, float]:
        net = nn.Sequential(Counted(), Counted())
        smp.set_partition(net[1], 1)
        model = smp.DistributedModel(net)
        model.register_post_partition_hook(lambda model, _: [one.fill_(40.0) for _, one in model.local_named_buffers()])
        inputs = torch.ones(4, 2, dtype=torch.float64)
        with pytest.raises((ValueError, smp.RemoteError), match="on purpose"):
            stepped(model, inputs, True)
        (before,) = (float(one) for _, one in model.local_named_buffers())
        stepped(model, inputs, False)
        (after,) = (float(one) for _, one in model.local_named_buffers())
        return before, after

    with in_process_ranks():
        job = Job(2)
        assert job.run(main, {}, 60) == [(40.0, 42.0)] * 2
        job.close()
