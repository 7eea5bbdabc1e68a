"""A rank of a job, 2 pipeline x 2 tensor-parallel ranks, whose batches differ in size, and change at different times.

``unequal.py MODE``: ``dynamic``, ``static`` or ``fast``. Results of microbatches with 4 samples have 4 KiB; larger
ones stay, without tensor parallelism, where they are made until somebody uses them.
"""

from __future__ import annotations

import sys

import shardwright as smp
import torch
from shardwright.nn.linear import DistributedLinear
from torch import nn

from tests.tensor_parallel.job import check_step, mean_square, start

WIDTH = 128
#: The samples of both tensor-parallel ranks in each step. Both know calls with 8 samples after the third step.
SAMPLES = [(8, 8), (8, 8), (8, 8), (8, 4), (8, 4), (8, 4), (4, 8), (4, 4), (8, 12), (12, 8), (0, 8), (8, 0), (8, 8)]


def make(linear: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*(linear(WIDTH, WIDTH) for _ in range(3)))


def main() -> None:
    start(static_mode=sys.argv[1] != "dynamic", fast_mode=sys.argv[1] == "fast", static_steps=1)
    net, whole = make(DistributedLinear), make(nn.Linear)
    smp.set_partition(net[1], 1)
    model = smp.DistributedModel(net)

    @smp.step
    def run(x: torch.Tensor) -> torch.Tensor:
        loss = mean_square(model(x))
        model.backward(loss)
        return loss

    for step, samples in enumerate(SAMPLES):
        generator = torch.Generator().manual_seed(step)
        batches = [torch.randn(count, WIDTH, generator=generator) for count in samples]
        check_step(model, whole, run, batches, f"step {step}")
    departures = smp.stats()["departures"]
    print(f"exact with {departures} steps run again")
    smp.shutdown()


if __name__ == "__main__":
    main()
