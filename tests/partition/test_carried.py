"""State that a module keeps between two uses joins the modules that run in between."""

from __future__ import annotations

import pytest
import torch
from shardwright.partition.trace import trace_forward
from torch import nn


class Converting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.outer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.outer.to(torch.float32)
        self.inner = self.inner.to(torch.float64)
        return self.outer(self.inner(x.double()).float())


def test_who_converts_weights_is_joined_with_their_holder() -> None:
    model = Converting()
    found = trace_forward(model, model, (torch.ones(1, 2),))
    assert [join.modules for join in found.joins] == [("", "inner")]


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.inner = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if not hasattr(self, "ready"):
            self.ready = True
        self.kept = x
        return self.inner(x) + self.kept


def test_attributes_that_are_set_before_they_are_read_are_temporary() -> None:
    model = Remembering()
    found = trace_forward(model, model, (torch.ones(1, 2),))
    assert set(found.attributes) == {("", "count"), ("", "ready"), ("", "kept")}
    assert found.temporaries == {("", "kept")}


class Averaging(nn.Module):
    """Reads what the microbatch before left, and leaves its own for the next."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.before, self.between, self.after = (nn.Linear(2, 2) for _ in range(3))
        if buffer:
            self.register_buffer("mean", torch.zeros(2))
        else:
            self.mean = torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        old = self.mean * 0.5
        x = torch.relu(self.between(x))
        self.mean = old + x.detach().mean(0)
        result: torch.Tensor = self.after(x)
        return result


@pytest.mark.parametrize("buffer", [False, True])
def test_what_runs_between_uses_of_carried_state_is_joined_with_its_user(buffer: bool) -> None:
    model = Averaging(buffer)
    found = trace_forward(model, model, (torch.ones(1, 2),))
    assert [join.modules for join in found.joins] == [("between", "")]


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(2, 2) for _ in range(3))
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.third(self.norm(self.second(self.norm(self.first(x)))))
        return result


def test_state_that_is_used_in_two_calls_keeps_together_what_lies_between_them() -> None:
    model = CalledTwice()
    found = trace_forward(model, model, (torch.randn(3, 2),))
    assert [join.modules for join in found.joins] == [("", "norm"), ("second", "norm")]


def test_a_counter_may_be_used_anywhere() -> None:
    class Counting(Averaging):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean += 1
            x = self.between(self.before(x))
            self.mean += 1
            return x

    model = Counting(buffer=True)
    assert not trace_forward(model, model, (torch.ones(1, 2),)).joins
