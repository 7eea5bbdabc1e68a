"""A traced model becomes a decision that keeps together what must be together, and no more."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shardwright.partition.decide import decide
from shardwright.partition.decision import Decision
from torch import nn


def settings(**keys: Any) -> Any:
    defaults = {"auto_partition": True, "default_partition": 0, "memory_weight": 0.8, "skip_tracing": False}
    return SimpleNamespace(**{**defaults, **keys})


def decided(model: nn.Module, *args: Any, num_devices: int = 2, **keys: Any) -> Decision:
    return decide(model, functools.partial(model, *args), settings(**keys), num_devices)


def joined(decision: Decision) -> set[tuple[str, str]]:
    return {join.modules for join in decision.joins}


def stack(num_layers: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(num_layers)))


def test_equal_layers_are_divided_equally_and_bytes_equal_the_model() -> None:
    model = stack()
    decision = decided(model, torch.ones(2, 8))
    assert [decision.modules[str(i)] for i in range(4)] == [0, 0, 1, 1]
    assert decision.parameter_bytes(0) == decision.parameter_bytes(1) == 2 * (8 * 8 + 8) * 4
    assert decision.joins == ()
    assert decision.report["boundary_crossings_per_microbatch"] == 1
    assert Decision.from_json(decision.to_json()) == decision


def test_the_same_model_is_divided_the_same_way_every_time() -> None:
    texts = {decided(stack(), torch.ones(2, 8)).to_json() for _ in range(3)}
    assert len(texts) == 1


def test_order_of_execution_not_of_registration_decides() -> None:
    class Reversed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in reversed(self.layers):
                x = layer(x)
            return x

    decision = decided(Reversed(), torch.ones(1, 8))
    assert [decision.modules[f"layers.{i}"] for i in range(4)] == [1, 1, 0, 0]
    untraced = decided(Reversed(), torch.ones(1, 8), skip_tracing=True)
    assert [untraced.modules[f"layers.{i}"] for i in range(4)] == [0, 0, 1, 1]


def test_without_a_trace_the_model_is_not_run() -> None:
    decision = decide(stack(), lambda: pytest.fail("was run"), settings(skip_tracing=True), 2)
    assert {decision.modules[str(i)] for i in range(4)} == {0, 1}


class Reads(nn.Module):
    """Each way of reading another module's weight, one at a time."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.near = nn.Linear(4, 4)
        self.far = nn.Linear(4, 4)
        self.closure = lambda x: x @ self.far.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.near(x)
        if self.how == "attribute":
            return nn.functional.linear(x, self.far.weight)
        if self.how == "closure":
            return self.closure(x)
        if self.how == "parameters":
            return x + sum(p.sum() for p in self.far.parameters())
        if self.how == "in a list":
            return torch.cat([x, self.far.weight])
        if self.how == "handed on":
            return self.near(self.far.weight)
        if self.how == "dtype and shape":
            return self.far(x.to(self.far.weight.dtype)[:, : self.far.weight.shape[1]])
        return self.far(x)


@pytest.mark.parametrize("how", ["attribute", "closure", "parameters", "in a list", "handed on"])
def test_a_weight_that_another_module_computes_with_joins_the_two(how: str) -> None:
    model = Reads(how)
    decision = decided(model, torch.ones(1, 4))
    assert joined(decision) == {("", "far")}
    assert decision.modules["far"] == decision.modules[""] == 0
    assert "far." in decision.joins[0].reason


@pytest.mark.parametrize("how", ["call", "dtype and shape"])
def test_calling_a_module_or_looking_at_its_weight_joins_nothing(how: str) -> None:
    assert decided(Reads(how), torch.ones(1, 4)).joins == ()


def test_a_weight_that_its_module_returns_or_its_holder_hands_on_joins_nothing() -> None:
    class Prompt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 4))

        def forward(self) -> torch.Tensor:
            return self.weight

    class Apply(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
            return self.body(x * scale)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prompt = Prompt()
            self.apply_to = Apply()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.apply_to(self.prompt() + x, scale=self.scale)

    assert decided(Model(), torch.ones(2, 4)).joins == ()


class Attributes(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first = Noting()
        self.second = Noting()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "set from outside":
            self.second.factor = 2.0
        x = self.second(self.first(x))
        if self.how == "read by the parent":
            x = x + self.first.seen
        if self.how == "collected in a list":
            x = x + sum(self.first.log)
        return x
