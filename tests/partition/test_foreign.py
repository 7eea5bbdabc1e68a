"""Tensors that are not the model's are left as they were, and modules that share one are joined if one writes it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from shardwright.partition.trace import trace_forward
from torch import nn


class Holder(nn.Module):
    """Has a tensor that is no buffer, which it writes to or reads."""

    def __init__(self, tensor: torch.Tensor, writes: bool) -> None:
        super().__init__()
        self.inner, self.tensor, self.writes = nn.Linear(3, 3), tensor, writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if self.writes:
            with torch.no_grad():
                self.tensor[1:].mul_(0.5).add_(y.mean())
        return y + self.tensor.sum()


def pair(first: bool, second: bool, tensors: int) -> nn.Sequential:
    shared = [torch.ones(4) for _ in range(tensors)]
    return nn.Sequential(Holder(shared[0], first), Holder(shared[-1], second))


def joins(model: nn.Module, *args: Any) -> set[tuple[str, ...]]:
    return {join.modules for join in trace_forward(model, model, args).joins}


@pytest.mark.parametrize("measure", [False, True])
def test_a_tensor_that_no_module_has_as_a_buffer_is_put_back(measure: bool) -> None:
    model = pair(True, True, tensors=2)
    trace_forward(model, model, (torch.ones(2, 3),), measure_times=measure, measure_memory=measure)
    assert [holder.tensor.tolist() for holder in model] == [[1.0] * 4] * 2


def test_a_module_that_is_not_registered_is_put_back() -> None:
    class Hides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [nn.BatchNorm1d(3)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.hidden[0](x)

    model = Hides()
    with torch.inference_mode():
        trace_forward(model, model, (torch.randn(4, 3),))
    (norm,) = model.hidden
    assert norm.running_mean.tolist() == [0.0] * 3
    assert norm.num_batches_tracked == 0


@pytest.mark.parametrize(
    ("first", "second", "tensors", "expected"),
    [(True, False, 1, True), (False, True, 1, True), (False, False, 1, False), (True, True, 2, False)],
)
def test_modules_that_share_a_tensor_which_one_of_them_writes_are_joined(
    first: bool, second: bool, tensors: int, expected: bool
) -> None:
    assert bool(joins(pair(first, second, tensors), torch.ones(2, 3))) == expected


def test_arguments_and_what_the_forward_makes_join_nothing() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.ReLU(inplace=True), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.tensor([1.0, 0.0, 1.0])
            mask[0] = 2.0
            return self.two(self.one(x) + self.one(mask)) + x.add_(1)

    x = torch.ones(2, 3)
    model = Writes()
    assert trace_forward(model, functools.partial(model), (x,)).joins == ()
    assert x.tolist() == [[1.0] * 3] * 2
