"""A call that could not cross ranks keeps its two modules together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shardwright.partition.trace import trace_forward
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint


def joined(model: nn.Module, *args: Any) -> set[tuple[str, ...]]:
    return {join.modules for join in trace_forward(model, model, args).joins}


class Twice(torch.autograd.Function):
    """Calls a module in its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
        return module(x) * 2


class Takes(nn.Linear):
    """Is given a function."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, function: Any, x: torch.Tensor) -> torch.Tensor:
        return function(super().forward(x))


class Gives(nn.Linear):
    """Gives a generator."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return (y * factor for factor in (1, 2))


class Enters(nn.Module):
    """Calls a module inside something that cannot cross ranks, one at a time."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.near, self.far = nn.Linear(4, 4), nn.Linear(4, 4)
        self.takes, self.gives = Takes(), Gives()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.near(x)
        if self.how == "vmap":
            return torch.func.vmap(self.far)(x)
        if self.how == "jvp":
            return torch.func.jvp(self.far, (x,), (x,))[1]
        if self.how == "custom function":
            return Twice.apply(x, self.far)
        if self.how == "function as argument":
            return self.takes(lambda y: y * 2, x)
        if self.how == "generator as result":
            return sum(self.gives(x))
        with torch.autograd.graph.save_on_cpu() if self.how == "saved tensors" else parametrize.cached():
            return self.far(x)


@pytest.mark.parametrize(
    ("how", "callee"),
    [
        ("vmap", "far"),
        ("jvp", "far"),
        ("custom function", "far"),
        ("saved tensors", "far"),
        ("cached parametrizations", "far"),
        ("function as argument", "takes"),
        ("generator as result", "gives"),
    ],
)
def test_a_module_whose_call_cannot_cross_ranks_is_joined_with_its_caller(how: str, callee: str) -> None:
    before = torch.autograd.Function.__dict__["apply"]
    assert joined(Enters(how), torch.ones(2, 4)) == {("", callee)}
    assert torch.autograd.Function.__dict__["apply"] is before


class Box:
    """A class of the script, with attributes of any kind."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.lock = x, threading.Lock()

    def __getstate__(self) -> Any:
        raise TypeError("it cannot be copied")


class Boxes(nn.Linear):
    """Returns a box, and is given one."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: Any) -> Any:
        return Box(super().forward(x.x if isinstance(x, Box) else x))


class Subclass(torch.Tensor):
    """A kind of tensor that no other rank knows."""


class Converts(nn.Linear):
    """Returns its result as another kind of tensor."""

    def __init__(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(4, 4)
        self.convert = convert

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.convert(super().forward(x if x.layout is torch.strided else x.to_dense()).abs())


def test_modules_between_which_an_unknown_object_travels_are_joined_with_their_caller() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Boxes(), Boxes())
    joins = trace_forward(model, model, (torch.ones(2, 4),)).joins
    assert {join.modules for join in joins} == {("", "1"), ("", "2")}
    assert all("Box, which cannot cross ranks" in join.reason for join in joins)


@pytest.mark.parametrize(
    ("convert", "named"),
    [
        (lambda x: x.detach().to_sparse_csr(), "sparse_csr tensor"),
        (lambda x: x.as_subclass(Subclass), "Subclass"),
    ],
)
def test_modules_between_which_an_unknown_tensor_travels_are_joined(convert: Any, named: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Converts(convert))
    (join,) = trace_forward(model, model, (torch.ones(2, 4),)).joins
    assert join.modules == ("", "1")
    assert named in join.reason


@pytest.mark.parametrize("convert", [lambda x: x.to_sparse_coo(), lambda x: x.conj(), torch.Tensor.double])
def test_known_tensors_join_nothing(convert: Any) -> None:
    assert not joined(nn.Sequential(nn.Linear(4, 4), Converts(convert)), torch.ones(2, 4))


def test_a_module_that_returns_the_weight_of_another_is_joined_with_it() -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return self.inner(x), self.inner.weight

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.returns = Returns()

        def forward(self, x: torch.Tensor) -> Any:
            y, weight = self.returns(x)
            return y @ weight

    assert joined(Uses(), torch.ones(2, 4)) == {("returns", "returns.inner")}


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_joins_nothing(reentrant: bool) -> None:
    class Checkpoints(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    assert joined(Checkpoints(), torch.ones(2, 4, requires_grad=True)) == set()


class Counts(nn.Module):
    """Changes what it keeps, or something for this forward only, inside a checkpoint or outside."""

    def __init__(self, how: str, *, inside: bool, reentrant: bool) -> None:
        super().__init__()
        self.how, self.is_inside, self.reentrant = how, inside, reentrant
        self.near, self.far = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.register_buffer("level", torch.zeros(4))
        self.count, self.noted = 0, []  # type: ignore[var-annotated]

    def change(self, x: torch.Tensor) -> None:
        match self.how:
            case "set":
                self.level = self.level * 0.5 + 1
            case "written":
                self.level.mul_(0.5).add_(1)
            case "number":
                self.count += 1
            case "list":
                self.noted.append(1)
            case "temporary":
                self.last = x.detach()

    def body(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_inside:
            self.change(x)
        return torch.tanh(self.near(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_inside:
            self.change(x)
        return self.far(checkpoint(self.body, x, use_reentrant=self.reentrant) + self.level + len(self.noted))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("how", ["set", "written", "number", "list", "temporary"])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("called", [False, True])
def test_what_is_changed_inside_a_checkpoint_joins_the_module_with_all_in_it(
    how: str, inside: bool, reentrant: bool, called: bool
) -> None:
    """Whether its own code is in the checkpoint, or it is called there."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.counts = Counts(how, inside=inside, reentrant=reentrant)
            self.other = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            x = self.other(x)
            return checkpoint(self.counts, x, use_reentrant=reentrant) if called else self.counts(x)

    within = {"counts.near", "counts.far", "counts.far.0", "counts.far.1"}
    expected = {("counts", path) for path in within} if (inside or called) and how != "temporary" else set()
    assert joined(Around(), torch.ones(2, 4, requires_grad=True)) == expected
