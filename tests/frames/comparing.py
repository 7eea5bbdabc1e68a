"""One step run in plain torch and divided over simulated ranks, compared exactly."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tests.frames.loopback import LoopbackJob, guarded

WIDTH = 3
Body = Callable[..., Any]


class Part(nn.Module):
    """A module with a weight, that runs ``body(self, ...)``."""

    def __init__(self, body: Body, **children: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.weight = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


def times_weight(part: Part, x: torch.Tensor) -> torch.Tensor:
    """The plainest body."""
    return x * part.weight


def data(*shape: int, needs_gradient: bool = False) -> torch.Tensor:
    """Random numbers."""
    return torch.randn(*(shape or (2, WIDTH)), dtype=torch.float64).requires_grad_(needs_gradient)


def owner_of(name: str) -> int:
    """The rank of a module: ``child``, ``other`` and what lies below them on 1, ``third`` on 2, ``back`` on 0."""
    ranks = {"child": 1, "other": 1, "third": 2, "back": 0}
    return next((ranks[part] for part in reversed(name.split(".")) if part in ranks), 0)


def weighted_sum(result: Any) -> torch.Tensor:
    """A loss that reads every floating-point tensor of a result, each in its own way."""
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return sum(((number + 1) * tensor * tensor).sum() for number, tensor in enumerate(tensors))  # type: ignore[return-value]


Step = Callable[[nn.Module, Callable[..., None], list[torch.Tensor]], Any]


def loss_of_result(model: nn.Module, backward: Callable[..., None], inputs: list[torch.Tensor]) -> Any:
    """The usual step: run, backward of a weighted sum; returns the result."""
    result = model(*inputs)
    backward(weighted_sum(result))
    return result


@dataclasses.dataclass
class Compared:
    """What the divided run left behind, for further looks."""

    job: LoopbackJob
    model: nn.Module
    result: Any


def run_divided(
    model: nn.Module, inputs: list[torch.Tensor], step: Step = loss_of_result, owners: Callable[[str], int] = owner_of
) -> Compared:
    """Run a step divided over simulated ranks."""
    job = LoopbackJob(model, owners)
    with guarded():
        result = job.run(lambda backward: step(model, backward, inputs))
    return Compared(job, model, result)


def assert_exact(
    model: nn.Module,
    *inputs: torch.Tensor,
    step: Step = loss_of_result,
    owners: Callable[[str], int] = owner_of,
) -> Compared:
    """Run a step both ways and compare results, gradients of parameters and inputs, inputs and buffers."""
    plain = copy.deepcopy(model)
    plain_inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs]
    expected = step(plain, torch.autograd.backward, plain_inputs)
    divided_inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs]
    compared = run_divided(model, divided_inputs, step, owners)
    assert "forward" in compared.job.server.kinds, "nothing crossed"
    assert compared.job.live_frames == 0
    _assert_same("the result", expected, compared.result)
    for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        _assert_same(f"the gradient of {name}", one.grad, other.grad)
    for index, (one, other) in enumerate(zip(plain_inputs, divided_inputs, strict=True)):
        _assert_same(f"the gradient of input {index}", one.grad, other.grad)
        _assert_same(f"input {index}", one, other)
    _assert_same("the buffers", dict(plain.named_buffers()), compared.job.owned_buffers())
    return compared


def _assert_same(what: str, expected: Any, found: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), f"{what}: {type(found)}"
        assert expected.dtype == found.dtype, what
        assert expected.shape == found.shape, what
        assert expected.requires_grad == found.requires_grad or expected.is_leaf, what
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, msg=lambda text: f"{what}: {text}")
        return
    assert type(expected) is type(found), f"{what}: {type(expected)} and {type(found)}"
    if isinstance(expected, list | tuple):
        assert len(expected) == len(found), what
        for index, (one, other) in enumerate(zip(expected, found, strict=True)):
            _assert_same(f"{what}[{index}]", one, other)
    elif isinstance(expected, dict):
        assert list(expected) == list(found), what
        for key, value in expected.items():
            _assert_same(f"{what}[{key!r}]", value, found[key])
    elif dataclasses.is_dataclass(expected):
        _assert_same(what, vars(expected), vars(found))
    else:
        assert expected == found, what
