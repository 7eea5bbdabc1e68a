"""Trains blocks over two ranks, and prints what each rank's memory held."""

from __future__ import annotations

import json
import sys

import shardwright as smp
import torch
from torch import nn

_WIDTH, _ROWS = 256, 4096


class Block(nn.Module):
    """Two linear layers; keeps its input, a hidden tensor, and where that is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(_WIDTH, 4 * _WIDTH)
        self.down = nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(torch.relu(self.up(x)))
        return hidden


def main(schedule: str, active: str) -> None:
    smp.init(
        pipeline_parallel_degree=2,
        microbatches=4,
        pipeline=schedule,
        active_microbatches=int(active),
        auto_partition=False,
        default_partition=0,
    )
    torch.manual_seed(0)
    net = nn.Sequential(*(Block() for _ in range(4)))
    for block in net[2:]:
        smp.set_partition(block, 1)
    model = smp.DistributedModel(net, trace_memory_usage=True)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))

    @smp.step
    def train(x: torch.Tensor) -> None:
        model.backward(model(x).square().mean())

    for _ in range(3):
        optimizer.zero_grad()
        train(torch.randn(_ROWS, _WIDTH))
        optimizer.step()
    print("found: " + json.dumps(smp.memory_report()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
