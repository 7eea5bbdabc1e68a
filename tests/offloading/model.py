"""The model of the programs of these tests: blocks on two ranks, all checkpointed."""

from __future__ import annotations

from typing import Any

import shardwright as smp
import torch
from torch import nn

WIDTH, ROWS, MICROBATCHES = 96, 64, 2


class Block(nn.Module):
    """A layer with activations."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


class Blocks(nn.Module):
    """Blocks one after another."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.blocks(x))


def start(*blocks: nn.Module, offload: Any = "disk", horizon: int = 1, **keys: Any) -> Any:
    """Start the job of two ranks, and return the model: the first half of the blocks on rank 0."""
    given = {"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES, "auto_partition": False}
    given |= {"default_partition": 0, "offload_activations": offload, "activation_loading_horizon": horizon}
    smp.init(given | keys)
    torch.manual_seed(2)
    module = Blocks(*blocks)
    for index, block in enumerate(module.blocks):
        smp.set_partition(block, index * 2 // len(blocks))
    model = smp.DistributedModel(module)
    smp.set_activation_checkpointing(module.blocks)
    return model


@smp.step
def train(model: Any, x: torch.Tensor) -> torch.Tensor:
    """One step."""
    loss = model(x).square().mean()
    model.backward(loss)
    return loss
