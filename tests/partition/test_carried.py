"""State that goes from one microbatch to the next: who uses it, and how often."""

from __future__ import annotations

import functools

import pytest
import torch
from shardwright.config import load_config
from shardwright.execution.placed import KeptState
from shardwright.partition.decide import decide
from shardwright.partition.trace import trace_forward
from shardwright.values import decode, encode
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


class ConvertingInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inner.double()
        return self.inner(x.double()).float()


def test_who_converts_weights_in_place_is_joined_with_their_holder() -> None:
    model = ConvertingInPlace()
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
        self.kept = self.inner(x)
        self.mean = x.mean()
        return self.inner(x) + self.kept - self.mean


def test_attributes_that_are_set_before_they_are_read_are_temporary() -> None:
    model = Remembering()
    found = trace_forward(model, model, (torch.ones(1, 2),))
    assert set(found.attributes) == {("", "count"), ("", "ready"), ("", "kept"), ("", "mean")}
    assert found.temporaries == {("", "kept"), ("", "mean")}


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
def test_a_module_may_call_others_between_two_uses_of_what_it_keeps(buffer: bool) -> None:
    model = Averaging(buffer)
    found = trace_forward(model, model, (torch.ones(1, 2),))
    assert not found.joins
    assert found.kept == (KeptState(names=("mean",), users={"": 1}),)


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(2, 2) for _ in range(3))
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.third(self.norm(self.second(self.norm(self.first(x)))))
        return result


def test_state_that_is_used_in_two_calls_has_two_stays() -> None:
    model = CalledTwice()
    found = trace_forward(model, model, (torch.randn(3, 2),))
    assert not found.joins
    (state,) = found.kept
    assert state.users == {"norm": 2}
    assert set(state.names) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def test_what_is_set_beside_other_state_is_kept_as_it_may_depend_on_that() -> None:
    model = Remembering()
    found = trace_forward(model, model, (torch.ones(1, 2),))
    assert {name for state in found.kept for name in state.names} == {"count", "ready", "mean", "kept"}


def test_temporary_attributes_and_buffers_that_nobody_changes_are_not_kept() -> None:
    class Passing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.scaled = x * 2
            return self.scaled

    found = trace_forward(Passing(), Passing(), (torch.ones(1, 2),))
    assert not found.kept
    assert not trace_forward(nn.BatchNorm1d(2).eval(), nn.BatchNorm1d(2).eval(), (torch.ones(1, 2),)).kept


def test_the_code_around_a_module_that_reads_what_it_keeps_is_a_user() -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Averaging(buffer=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + self.inner.mean

    model = Reading()
    found = trace_forward(model, model, (torch.ones(1, 2),))
    (state,) = found.kept
    assert state.users == {"": 1, "inner": 1}


def test_decisions_keep_their_state_on_their_way() -> None:
    model = CalledTwice()
    decision = decide(model, functools.partial(model, torch.randn(3, 2)), load_config({}, {}, {}), 1)
    assert decision.kept
    assert decode(*encode(decision)) == decision
