"""Attributes that a forward sets on one rank are not read on another as they were before."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shardwright.errors import NotOwnedError
from shardwright.model.ownership import apply_ownership
from shardwright.partition.decide import decide
from shardwright.partition.decision import Decision
from shardwright.values import decode, encode
from torch import nn


def decided(model: nn.Module, *args: Any) -> Decision:
    settings = SimpleNamespace(
        auto_partition=True, default_partition=0, memory_weight=0.8, skip_tracing=False, refine_partition=False
    )
    return decide(model, functools.partial(model, *args), settings, 2)


class Noting(nn.Module):
    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen: torch.Tensor | None = None
        self.log: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.mean()
        self.log.append(self.seen)
        return self.layer(x) * self.factor


class Auxiliary(nn.Module):
    """Two layers that leave something behind in an attribute, which the script may read after the step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Noting() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    "use",
    [
        lambda value: value + 1,
        lambda value: torch.ones(1) * value,
        lambda value: torch.stack([torch.ones(()), value]),
        lambda value: float(value),
        lambda value: bool(value),
        lambda value: sum(value),
        lambda value: value.item(),
        lambda value: value == 1,
    ],
)
def test_an_attribute_set_on_another_rank_is_not_read_as_it_was_before(use: Any) -> None:
    decision = decode(*encode(decided(Auxiliary(), torch.ones(1, 4))))
    assert [decision.modules[f"layers.{i}"] for i in range(2)] == [0, 1]
    model = Auxiliary()
    apply_ownership(model, decision, 0)
    assert model.layers[0].seen is None
    assert model.layers[0].log == []
    assert "layers.1.seen" in repr(model.layers[1].seen)
    with pytest.raises(NotOwnedError, match=r"'layers\.1\.seen' is set in a forward on pp_rank 1"):
        use(model.layers[1].seen)
    with pytest.raises(NotOwnedError, match=r"'layers\.1\.log'"):
        use(model.layers[1].log)
    model.layers[1].seen = 3
    assert model.layers[1].seen == 3
