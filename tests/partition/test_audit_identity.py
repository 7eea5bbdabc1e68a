"""The audit knows tensors by identity, also when a forward lets go of them."""

from __future__ import annotations

import torch
from shardwright.partition.trace import trace_forward
from torch import nn


class Renews(nn.Module):
    """Puts a new tensor in its buffer's place, which may then be used again for anything."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        self.total = self.total + y.detach().mean(0)
        return y + self.total


def test_a_buffer_that_was_replaced_is_not_mistaken_for_a_later_tensor() -> None:
    for _ in range(20):
        model = nn.Sequential(*(Renews() for _ in range(6)))
        trace = trace_forward(model, model, (torch.randn(3, 4),))
        assert trace.joins == ()
