"""A rank of a job, 2 pipeline x 2 tensor-parallel ranks under zero_bubble, of which one fails a step before the other.

When it does, the other one has left weight gradients for later, which the failed step throws away.
"""

from __future__ import annotations

import time

import pytest
import shardwright as smp
import torch
from shardwright.nn.linear import DistributedLinear
from torch import nn

from tests.tensor_parallel.job import check_step, mean_square, start

WIDTH = 64
STEPS = 4
#: Before these steps one fails.
FAILING = (1, 3)


def make(linear: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(linear(WIDTH, WIDTH), linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def main() -> None:
    start(microbatches=4, pipeline="zero_bubble", active_microbatches=2)
    net, whole = make(DistributedLinear), make(nn.Linear)
    smp.set_partition(net[1], 1)
    model = smp.DistributedModel(net)

    @smp.step
    def run(x: torch.Tensor) -> torch.Tensor:
        loss = mean_square(model(x))
        if fails and smp.tp_rank() == 1:
            time.sleep(0.2)
            raise ValueError("this step was told to fail")
        model.backward(loss)
        return loss

    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        batches = [torch.randn(16, WIDTH, generator=generator) for _ in range(2)]
        fails = step in FAILING
        if fails:
            with pytest.raises((ValueError, smp.RemoteError), match="this step was told to fail"):
                run(batches[smp.dp_rank()])
            fails = False
        check_step(model, whole, run, batches, f"step {step}")
    print("exact after failed steps")
    smp.shutdown()


if __name__ == "__main__":
    main()
