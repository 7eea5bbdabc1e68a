"""Arguments and results of checkpointed modules: structures, writes in place, layouts, modes, hooks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import shardwright as smp
import torch
from torch import nn


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


@dataclass
class Box:
    value: torch.Tensor
    notes: list[int]


Body = Callable[[nn.Module, Any], Any]
BODIES: dict[str, Body] = {}


def body(function: Body) -> Body:
    BODIES[function.__name__] = function
    return function


class Module(nn.Module):
    """Runs one of the bodies below, on its weight and arguments."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.weight = name, nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.dense, self.dropout = nn.Linear(6, 6), nn.Dropout(0.5)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args and not kwargs else kwargs
        return BODIES[self.name](self, given)


@body
def plain(m: Any, x: torch.Tensor) -> Any:
    return torch.tanh(m.dropout(m.dense(x * m.weight)))


@body
def writes_to_its_argument(m: Any, x: torch.Tensor) -> Any:
    x.mul_(m.weight).tanh_()
    return x * x


@body
def returns_its_argument(m: Any, x: torch.Tensor) -> Any:
    y = torch.tanh(x.clone() * m.weight)
    x.copy_(y)
    return x


@body
def returns_a_view(m: Any, x: torch.Tensor) -> Any:
    return (x * m.weight).tanh().view(2, -1)[:, 1:]


@body
def takes_and_returns_structures(m: Any, given: dict[str, Any]) -> Any:
    first, (second, nothing) = given["pair"], given["more"]
    assert nothing is None
    assert first.left is given["again"]
    return {"a": [torch.tanh(first.left * m.weight), None], "b": Pair(second * first.right, "text"), "c": ()}


@body
def changes_a_list(m: Any, given: dict[str, Any]) -> Any:
    given["list"].append(torch.tanh(given["x"] * m.weight))
    given["box"].notes.append(len(given["box"].notes))
    given["box"].value = given["box"].value * 2
    return given["x"].sin() * m.weight * given["box"].value * len(given["box"].notes)


@body
def under_autocast(m: Any, x: torch.Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return m.dense(x).float().tanh() * m.weight


@body
def without_gradients_inside(m: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        scale = m.dropout(m.dense(x))
    return torch.tanh(x * m.weight * scale)


@body
def differentiates_inside(m: Any, x: torch.Tensor) -> Any:
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        (inner,) = torch.autograd.grad(torch.tanh(y * m.weight).sum(), y, create_graph=True)
    return torch.sin(inner * x)


@body
def checkpoints_inside(m: Any, x: torch.Tensor) -> Any:
    return smp.checkpoint(
        m.dense, torch.utils.checkpoint.checkpoint(m.dropout, x * m.weight, use_reentrant=False)
    ).tanh()


@body
def reentrant_inside(m: Any, x: torch.Tensor) -> Any:
    return torch.utils.checkpoint.checkpoint(m.dense, (x * m.weight).tanh(), use_reentrant=True).tanh()


@body
def hooks_inside(m: Any, x: torch.Tensor) -> Any:
    y = torch.tanh(x * m.weight)
    y.register_hook(lambda gradient: gradient * 2)
    return y * y


@body
def unused_result(m: Any, x: torch.Tensor) -> Any:
    return torch.tanh(x * m.weight), torch.exp(m.dense(x)).sin()


@body
def layout_decides(m: Any, x: torch.Tensor) -> Any:
    y = x.t().contiguous().t() if x.is_contiguous() else x.contiguous()
    return torch.tanh(y.reshape(-1) * m.weight.repeat(y.numel() // 6))


def arguments(name: str, x: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if name == "takes_and_returns_structures":
        return (), {"pair": Pair(x, 3), "more": [x * 2, None], "again": x}
    if name == "changes_a_list":
        return (), {"x": x, "list": [], "box": Box(x + 1, [1])}
    if name == "layout_decides":
        return (x.t().contiguous().t(),), {}
    return (x,), {}


def run(name: str, call: Callable[..., Any], rows: int) -> list[Any]:
    torch.manual_seed(4)
    module = Module(name)
    leaf = torch.randn(rows, 6, requires_grad=True)
    found: list[Any] = []
    for _ in range(2):
        args, kwargs = arguments(name, leaf * 1.5)
        result = call(module, *args, **kwargs)
        given, _ = torch.utils._pytree.tree_flatten((args, kwargs))
        values, shape = torch.utils._pytree.tree_flatten(result)
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        used = tensors[:1] if name == "unused_result" else tensors
        sum((one.square().sum() for one in used), torch.zeros(())).backward()
        found += [one.detach().clone() for one in tensors]
        found += [one.detach().clone() for one in given if isinstance(one, torch.Tensor)]
        found += [str(shape), [value for value in values if not isinstance(value, torch.Tensor)]]
        if "box" in kwargs:
            found += [len(kwargs["list"]), kwargs["box"].notes, kwargs["box"].value.detach()]
    found += [parameter.grad for parameter in module.parameters()]
    return [*found, leaf.grad, torch.rand(2)]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) if isinstance(other, torch.Tensor) else one == other


@pytest.mark.parametrize("rows", [2, 4000], ids=["small", "large"])
@pytest.mark.parametrize("name", BODIES)
def test_a_call_gives_the_same_bits_as_without_a_checkpoint(name: str, rows: int) -> None:
    assert_same(
        run(name, smp.checkpoint, rows), run(name, lambda module, *args, **kwargs: module(*args, **kwargs), rows)
    )


def test_an_argument_may_be_written_to_after_the_call() -> None:
    module = Module("plain")

    def gradient(call: Callable[..., Any]) -> torch.Tensor:
        torch.manual_seed(1)
        leaf = torch.ones(2, 6, requires_grad=True)
        given = leaf * 2
        kept = torch.ones(2, 6)
        result = call(module, given + kept)
        result = result + call(module, kept)
        given.add_(1)
        if call is smp.checkpoint:
            kept.zero_()
        (found,) = torch.autograd.grad(result.square().sum(), leaf)
        return found

    assert torch.equal(gradient(smp.checkpoint), gradient(lambda module, x: module(x)))


def test_numbers_that_are_not_preserved_are_drawn_anew() -> None:
    module, x = nn.Dropout(0.5), torch.ones(4000, requires_grad=True)
    torch.manual_seed(2)
    result = smp.checkpoint(
        nn.Sequential(nn.Linear(1, 1), module), torch.ones(4000, 1, requires_grad=True), preserve_rng_state=False
    )
    state = torch.get_rng_state()
    result.sum().backward()
    assert not torch.equal(state, torch.get_rng_state())
    result = smp.checkpoint(nn.Sequential(nn.Linear(1, 1), module), torch.ones(4000, 1, requires_grad=True))
    state = torch.get_rng_state()
    result.sum().backward()
    assert torch.equal(state, torch.get_rng_state())
    assert x.grad is None


def test_settings_of_the_call_are_those_of_the_second_computation() -> None:
    class Making(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (torch.zeros(3) + x * self.weight).sin() * torch.ones(3)

    module = Making()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            result = smp.checkpoint(module, torch.ones(3, dtype=torch.float32))
    finally:
        torch.set_default_dtype(before)
    result.sum().backward()
    assert module.weight.grad is not None
    assert torch.get_default_dtype() == before


def test_gradients_of_higher_order_pass_through() -> None:
    module = Module("plain").eval()

    def second(call: Callable[..., Any]) -> torch.Tensor:
        x = torch.linspace(-1, 1, 12).view(2, 6).requires_grad_()
        (first,) = torch.autograd.grad(call(module, x).square().sum(), x, create_graph=True)
        (found,) = torch.autograd.grad(first.square().sum(), x)
        return found

    assert torch.equal(second(lambda module, x: module(x)), second(smp.checkpoint))


def test_a_graph_that_is_kept_gives_the_same_gradient_twice() -> None:
    module = Module("plain")
    module.dropout.eval()
    result = smp.checkpoint(module, torch.ones(2, 6)).sum()
    result.backward(retain_graph=True)
    first = module.weight.grad
    assert first is not None
    first, module.weight.grad = first.clone(), None
    result.backward()
    assert torch.equal(first, module.weight.grad)


def test_sparse_and_nested_tensors_are_copied_too() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 2))

        def forward(self, matrix: torch.Tensor, ragged: torch.Tensor) -> torch.Tensor:
            return torch.tanh(torch.sparse.mm(matrix, self.weight)).sum() * torch.exp(ragged.values() * self.weight[0])

    module, matrix = Sparse(), torch.eye(3).to_sparse()
    ragged = torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(1, 2)], layout=torch.jagged)
    found = []
    for call in (smp.checkpoint, lambda module, *args: module(*args)):
        module.zero_grad()
        call(module, matrix, ragged).square().sum().backward()
        found.append(module.weight.grad)
    assert torch.equal(*found)


def test_nothing_is_checkpointed_where_there_is_no_backward() -> None:
    module = Module("plain")
    with torch.inference_mode(), torch.set_grad_enabled(True):
        assert not smp.checkpoint(module, torch.ones(2, 6)).requires_grad
    with torch.no_grad():
        assert not smp.checkpoint_sequential(nn.Sequential(module), torch.ones(2, 6)).requires_grad
    module.requires_grad_(False)
    assert smp.checkpoint(module, torch.ones(2, 6)).grad_fn is None
