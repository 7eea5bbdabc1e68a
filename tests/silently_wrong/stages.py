"""The small models that several files of scenarios use, and their batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

BATCH = 8
WIDTH = 6


class Layer(nn.Module):
    """A dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


class TwoStages(nn.Module):
    """``here`` on pp_rank 0, ``there`` on pp_rank 1, and ``again`` on pp_rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.here, self.there, self.again = Layer(), Layer(), Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.there(self.here(x)))


class Noting(nn.Module):
    """Leaves an auxiliary loss behind in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.penalty: Any = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.penalty = y.square().mean()
        return y


def batch(seed: int = 1) -> torch.Tensor:
    """A batch of numbers, the same everywhere."""
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(seed))
