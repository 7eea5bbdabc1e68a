"""Checkpoints around code of a module that changes what the module keeps: one process computes it twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from shardwright.errors import FrameError, PartitionError, RemoteError
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.frames.job import Job, job_fixture
from tests.state.keepers import Keeper
from tests.state.running import SIZES, check
from tests.state.test_order import Chain

job = job_fixture(3)
CHANGES: dict[str, Callable[[Any], None]] = {}


def change(function: Callable[[Any], None]) -> Callable[[Any], None]:
    CHANGES[function.__name__] = function
    return function


@change
def a_buffer_set(keeper: Any) -> None:
    keeper.level = keeper.level * 0.5 + 1


@change
def a_buffer_written(keeper: Any) -> None:
    keeper.level.mul_(0.5).add_(1)


@change
def a_number(keeper: Any) -> None:
    keeper.count += 1


@change
def a_list(keeper: Any) -> None:
    keeper.noted.append(1)


class Changing(Keeper):
    """Changes what it keeps inside a checkpoint around its own code, and calls a child outside of it."""

    def __init__(
        self, width: int, how: str, *, reentrant: bool = False, as_function: bool = False, in_training: bool = False
    ) -> None:
        super().__init__(width)
        self.how, self.reentrant, self.as_function = how, reentrant, as_function
        self.in_training = in_training
        self.child = nn.Linear(width, width)

    def keep(self, width: int) -> None:
        self.register_buffer("level", torch.zeros(width))
        self.count, self.noted = 0, []  # type: ignore[var-annotated]

    def body(self, x: torch.Tensor) -> torch.Tensor:
        if self.how:
            CHANGES[self.how](self)
        return self.inside(torch.tanh(x * self.weight))

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)

    def kept(self) -> torch.Tensor:
        return self.level.clone() + self.count + len(self.noted)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        body = (lambda given: self.body(given)) if self.as_function else self.body
        if self.in_training and not torch.is_grad_enabled():
            x = body(x)
        else:
            x = checkpoint(body, x, use_reentrant=self.reentrant)
        return self.child(x + self.kept())


class Calling(Changing):
    """Changes nothing itself inside the checkpoint, but reads what a module called there changes."""

    def __init__(self, width: int, how: str) -> None:
        super().__init__(width, how)
        self.norm = nn.BatchNorm1d(width)

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.tanh(x))

    def kept(self) -> torch.Tensor:
        return self.norm.running_mean.clone()


def chain(make: Callable[[int], nn.Module]) -> Chain:
    torch.manual_seed(5)
    return Chain(SIZES["small"][1], make)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("as_function", [False, True])
@pytest.mark.parametrize("how", CHANGES)
def test_a_module_with_parts_elsewhere_that_changes_what_it_keeps_is_refused(
    job: Job, how: str, as_function: bool, reentrant: bool
) -> None:
    """The trace, which runs without gradients, did not see the checkpoint."""
    options = {"as_function": as_function, "reentrant": reentrant, "in_training": True}
    model = chain(lambda width: Changing(width, how, **options))
    with pytest.raises(
        (FrameError, RemoteError),
        match=r"module 'keeper' .*parts on other ranks, and changed 'keeper\.(level|count|no)",
    ):
        check(job, model, {"keeper.child": 1}, {})


@pytest.mark.parametrize("how", CHANGES)
def test_a_module_pinned_apart_from_its_parts_that_a_trace_sees_change_it_is_refused(job: Job, how: str) -> None:
    model = chain(lambda width: Changing(width, how))
    with pytest.raises((PartitionError, RemoteError), match=r"'keeper' changes keeper\.\w+ inside a checkpoint"):
        check(job, model, {"keeper": 0, "keeper.child": 1}, {})


@pytest.mark.parametrize("as_function", [False, True])
@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("keeper", [0, 1])
def test_a_module_that_lies_whole_on_a_rank_changes_it_twice(
    job: Job, keeper: int, how: str, as_function: bool
) -> None:
    model = chain(lambda width: Changing(width, how, as_function=as_function))
    check(job, model, {"keeper": keeper, "last": 2}, {})


def test_a_module_with_parts_elsewhere_that_changes_nothing_there_is_exact(job: Job) -> None:
    check(job, chain(lambda width: Changing(width, "")), {"keeper.child": 1}, {})


def test_what_a_module_called_inside_changes_is_changed_twice(job: Job) -> None:
    check(job, chain(lambda width: Calling(width, "")), {"keeper.child": 1}, {})
