"""A small model that one or two ranks train, for tests of what a load has changed and what it has not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import shardwright as smp
import torch
from torch import nn


@smp.step
def stepped(model: smp.DistributedModel, inputs: torch.Tensor) -> torch.Tensor:
    loss = model(inputs).square().mean()
    model.backward(loss)
    return loss


class Training:
    """Two layers, the last on rank 1 if there is one, and an optimizer made by ``optimizer(parameters, lr=0.1)``."""

    def __init__(self, ranks: int, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        if ranks > 1:
            smp.set_partition(net[1], 1)
        self.model = smp.DistributedModel(net)
        self.optimizer: Any = smp.DistributedOptimizer(optimizer(self.model.parameters(), lr=0.1))

    def step(self, number: int = 0) -> None:
        self.optimizer.zero_grad()
        stepped(self.model, self.batch(number))
        self.optimizer.step()

    def batch(self, number: int) -> torch.Tensor:
        """The inputs of a step."""
        return torch.full((2, 3), 1.0 + number)

    def values(self) -> dict[str, torch.Tensor]:
        """Copies of all that this rank has: parameters, and their optimizer state."""
        found = {name: one.detach().clone() for name, one in self.model.local_named_parameters()}
        for number, one in self.optimizer.local_state_dict()["state"].items():
            found |= {f"state {number} {key}": torch.as_tensor(value).clone() for key, value in one.items()}
        return found
