"""The partition counts the arguments of checkpointed modules, and nothing that they compute."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.partition.decide import divide, partition_request
from shardwright.partition.trace import trace_forward
from shardwright.partition.tree import ModelTree
from torch import nn

CFG = SimpleNamespace(auto_partition=True, default_partition=0, memory_weight=1.0, refine_partition=False)


class Layer(nn.Module):
    def __init__(self, middle: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, middle), nn.Linear(middle, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.outer(torch.tanh(self.inner(x))))


def model() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(Layer(8), Layer(8), Layer(8)), Layer(8))


def costs(module: nn.Module) -> dict[str, int]:
    trace = trace_forward(module, module, (torch.ones(100, 4),))
    request = partition_request(ModelTree.of(module), trace, (), (), CFG, 2)
    return {row["name"]: row["own_activation_bytes"] for row in request["modules"]}


ROW = 100 * 4


@pytest.mark.parametrize(("strategy", "groups"), [("contiguous", 1), ("group_2", 2), ("each", 3)])
def test_a_sequence_costs_the_arguments_of_its_groups(strategy: str, groups: int) -> None:
    module: Any = model()
    smp.set_activation_checkpointing(module[0], strategy=strategy)
    smp.set_activation_checkpointing(module[0][0].inner)
    found = costs(module)
    inside = {name: number for name, number in found.items() if name.startswith("0")}
    assert sum(inside.values()) == groups * 4 * ROW
    assert found["1.inner"] == 8 * ROW


def test_what_is_checkpointed_weighs_less() -> None:
    def beside_the_first(marked: bool) -> list[bool]:
        module = nn.Sequential(*(Layer(400) for _ in range(2)), *(Layer(400) for _ in range(4)))
        if marked:
            for layer in module[2:]:
                smp.set_activation_checkpointing(layer)
        trace = trace_forward(module, module, (torch.ones(2000, 4),))
        found = divide(module, trace, CFG, 2).modules
        return [found[str(index)] == found["0"] for index in range(6)]

    assert beside_the_first(False) == [True, True, True, False, False, False]
    assert beside_the_first(True) == [True, False, False, False, False, False]
