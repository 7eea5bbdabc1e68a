"""A rank of a pipeline whose large results stay where they are made; prints by which routes tensors left it."""

from __future__ import annotations

import json
import sys
from typing import Any

import shardwright as smp
import torch
from shardwright.model.sentinel import is_sentinel
from torch import nn

ROWS, WIDTH = 64, 2048
STEPS, MICROBATCHES = 3, 2


class Layer(nn.Module):
    """Small weights, and a large result."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, dtype=torch.float64))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(value * self.weight)


class Loop(nn.Module):
    """Calls its layers one by one and looks at none of their results; one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(5))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](value)
        value = self.layers[2](self.layers[1](first))
        return self.layers[4](self.layers[3](first) + value).mean()


def main() -> None:
    """Trains, compares with one process, and prints what travelled."""
    keys: dict[str, Any] = json.loads(sys.argv[1])
    smp.init(
        {
            "pipeline_parallel_degree": 2,
            "ddp": False,
            "microbatches": MICROBATCHES,
            "auto_partition": False,
            "default_partition": 0,
            **keys,
        }
    )
    torch.manual_seed(1)
    module, alone = Loop(), Loop()
    alone.load_state_dict(module.state_dict())
    batch = torch.rand(MICROBATCHES * ROWS, WIDTH, dtype=torch.float64)
    for part in batch.chunk(MICROBATCHES):
        (alone(part) / MICROBATCHES).backward()
    for layer, rank in zip(module.layers, (1, 0, 1, 1, 0), strict=True):
        smp.set_partition(layer, rank)
    model = smp.DistributedModel(module)

    @smp.step
    def train(part: torch.Tensor) -> torch.Tensor:
        loss = model(part)
        model.backward(loss)
        return loss

    for _ in range(STEPS):
        model.zero_grad()
        train(batch)
    for name, parameter in module.named_parameters():
        if is_sentinel(parameter):
            continue
        torch.testing.assert_close(parameter.grad, alone.get_parameter(name).grad, rtol=1e-10, atol=1e-12)
    stats = smp.comm_stats()
    print(json.dumps({"routes": stats["routes"], "fallbacks": stats["fallbacks"]}))
    smp.shutdown()


main()
