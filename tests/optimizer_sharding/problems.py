"""Models, optimizers and batches, and their training in one process of plain PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

WIDTH = 6


class Tied(nn.Module):
    """A weight that two modules share, one that no batch uses, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 5)
        self.body = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.head = nn.Linear(5, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        index = (inputs.abs() * 3).long() % 9
        return self.head(self.frozen(self.body(self.table(index)))).mean(1)


class Scalars(nn.Module):
    """Parameters of one element, fewer than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor([0.5]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.scale + self.shift


def layers(*widths: int) -> nn.Sequential:
    """A stack of linear layers."""
    made: list[nn.Module] = []
    for inner, outer in itertools.pairwise(widths):
        made += [nn.Linear(inner, outer), nn.Tanh()]
    return nn.Sequential(*made)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tiny": lambda: layers(WIDTH, 3, 1),
    "odd": lambda: layers(WIDTH, 33, 7, 5),
    "large": lambda: layers(WIDTH, 131, 97, 3),  # a weight of 99 KiB
    "tied": Tied,
    "scalars": Scalars,
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    "sgd-plain": lambda groups: torch.optim.SGD(groups, lr=0.05),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True),
    "adam-loop": lambda groups: torch.optim.Adam(groups, lr=0.01, foreach=False),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "adamw-fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=0.5, centered=True),
    "adadelta": lambda groups: torch.optim.Adadelta(groups),
    "adamax": lambda groups: torch.optim.Adamax(groups),
    "nadam": lambda groups: torch.optim.NAdam(groups),
    "radam": lambda groups: torch.optim.RAdam(groups),
    "asgd": lambda groups: torch.optim.ASGD(groups),
    "rprop": lambda groups: torch.optim.Rprop(groups),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.05),
}


def groups_of(parameters: Iterator[nn.Parameter] | list[nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups with different options."""
    listed = list(parameters)
    return [
        {"params": [one for one in listed if one.dim() > 1], "weight_decay": 0.1},
        {"params": [one for one in listed if one.dim() <= 1], "weight_decay": 0.0},
    ]


def built(name: str) -> nn.Module:
    """The model of a name, the same in every process."""
    torch.manual_seed(3)
    return MODELS[name]()


def batch(step: int, replica: int, size: int = 8) -> torch.Tensor:
    """What a replica trains on in a step."""
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(1000 * step + replica))


def loss_of(outputs: torch.Tensor) -> torch.Tensor:
    """The loss of a microbatch."""
    return (outputs - 0.3).square().sum()


@dataclass
class Reference:
    """A whole model and its optimizer in one process, which see the batches of all replicas."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    replicas: int
    microbatches: int

    def accumulate(self, step: int) -> None:
        """Add the gradients of a step."""
        for replica in range(self.replicas):
            for part in batch(step, replica).chunk(self.microbatches):
                (loss_of(self.module(part)) / (self.microbatches * self.replicas)).backward()


def with_optimizer(problem: Any, name: str) -> Any:
    """A problem of parity with another optimizer, whose bytes are not those of the account."""
    make = OPTIMIZERS[name]
    return replace(problem, optimizer=lambda model: make(groups_of(list(model.parameters()))), accounted=False)
