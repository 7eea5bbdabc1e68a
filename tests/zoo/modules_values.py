"""What is handed to modules and comes back from them: views, writes, functions, nested containers, unusual tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.parity.models_control import WIDTH, dense
from tests.parity.models_values import Types, types_step
from tests.parity.problem import Models, Phase

from .entry import Entry
from .entry_builders import module, numbered, spread


class WritesTo(nn.Module):
    """Writes to its input in one of several ways, computes with it, and may give it back."""

    def __init__(self, write: Callable[[torch.Tensor], Any], gives_back: bool) -> None:
        super().__init__()
        self.inner = dense()
        self.write, self.gives_back = write, gives_back

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(x)
        y: torch.Tensor = self.inner(x.clone())
        return x.add_(y) if self.gives_back else y


def set_column(x: torch.Tensor) -> None:
    x[:, 1] = x[:, 0] * 2


def overwrite(x: torch.Tensor) -> None:
    x.copy_(x.detach() * 0.5)


class InPlace(nn.Module):
    """A tensor is written to by every module that it is given to, and goes on in the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.one = WritesTo(lambda x: x.mul_(2).add_(0.1), gives_back=False)
        self.two = WritesTo(lambda x: x.sub_(0.2).neg_(), gives_back=True)
        self.three = WritesTo(set_column, gives_back=False)
        self.four = WritesTo(overwrite, gives_back=True)
        self.before = dense()

    def forward(self, x: torch.Tensor) -> Any:
        x = self.before(x) * 1
        y = self.one(x) + x
        x = self.two(x)
        y = y + self.three(x) - x
        x = self.four(x)
        y += x
        y[0].mul_(2)
        return y


class Halves(nn.Module):
    """Two modules get views of one tensor; one of them writes, which the whole and a third view must show."""

    def __init__(self) -> None:
        super().__init__()
        half = WIDTH // 2
        self.before, self.after = dense(), dense()
        self.left = nn.Linear(half, half)
        self.right = Doubles(half)

    def forward(self, x: torch.Tensor) -> Any:
        whole = self.before(x) * 1
        left, right = whole[:, : WIDTH // 2], whole[:, WIDTH // 2 :]
        y = self.right(right)
        z = self.left(left) + self.left(whole[:, 2:5])
        return self.after(whole) + torch.cat((y, z), dim=1) * whole.t().reshape(whole.shape)


class Doubles(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.inner = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        y: torch.Tensor = self.inner(x.sin())
        return y


class Gives(nn.Module):
    """Gives its own parameters away, in a container, beside what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"result": self.inner(x).tanh() * self.scale, "parameters": [self.inner.weight, self.scale]}


class GivesParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Gives() for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        given: list[torch.Tensor] = []
        for layer in self.layers:
            results = layer(x)
            x = results["result"]
            given += results["parameters"]
        return x @ given[0], given


def decay_step(models: Models, x: torch.Tensor) -> Any:
    """A loss with the parameters in it that the model gives back."""
    output, parameters = models["model"](x)
    loss = output.square().mean() + 0.01 * sum(parameter.square().sum() for parameter in parameters)
    models["model"].backward(loss)
    return loss, output, parameters[-1]


class Applies(nn.Module):
    """Is given a function that computes with a parameter of its caller, and an iterator to take from."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dense()

    def forward(self, x: torch.Tensor, function: Callable[[Any], Any], scales: Iterable[float]) -> Any:
        return function(self.inner(x)), (scale * 2 for scale in scales)


class HandsFunctions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.applies = Applies()
        self.gate = nn.Parameter(torch.ones(WIDTH))

    def scales(self) -> Iterator[float]:
        yield from (0.5, 1.0, 1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, doubled = self.applies(x, lambda y: y * self.gate, scales=self.scales())
        result: torch.Tensor = y * sum(doubled)
        return result


class Grows(nn.Module):
    """Takes nested containers apart, and gives others back."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.inner = index, dense()

    def forward(self, state: dict[str, Any], /, *extras: Any, **options: Any) -> dict[str, Any]:
        layers = OrderedDict(state["layers"])
        y = self.inner(layers[self.index - 1]["out"][0] * options["scale"][("x", 1)]) + extras[0][1]
        layers[self.index] = {"out": [y, None, (y.detach(), "text")], "norms": {"l2": [y.norm(dim=1)]}}
        return {"layers": layers, "sum": [*state["sum"], (y.mean(),)], "seen": state["seen"] | {self.index}}


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Grows(index) for index in range(1, 5))

    def forward(self, x: torch.Tensor) -> Any:
        state: dict[str, Any] = {"layers": {0: {"out": [x]}}, "sum": [], "seen": frozenset({0})}
        for layer in self.layers:
            state = layer(state, (None, x), scale={("x", 1): 0.5, ("x", 2): None})
        assert state["seen"] == {0, 1, 2, 3, 4}
        total = sum(part["out"][0] * part["norms"]["l2"][0][:, None] for _, part in list(state["layers"].items())[1:])
        return total + sum(mean for (mean,) in state["sum"])


class Narrow(nn.Module):
    """Computes in bfloat16, and gives numbers of many types, some of which have gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, keep: torch.Tensor, turned: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weight, bias = self.inner.weight.bfloat16(), self.inner.bias.bfloat16()
        y = functional.linear(x, weight, bias).where(keep, x)
        wide = self.inner(y.double())
        turned = torch.polar(wide.abs() + 0.1, wide) + turned.conj()
        small = (wide * 10).to(torch.int8)
        return y, keep & (wide < 0.5), turned, small, wide.half()


class Numbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Narrow() for _ in range(4))
        self.phase = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> Any:
        y, keep, turned = x.bfloat16(), x > 0, x * self.phase
        total = x
        for layer in self.layers:
            y, keep, turned, small, half = layer(y, keep, turned)
            total = total + small.to(x.dtype) * 0.01 + half.to(x.dtype)
        return total + y.to(x.dtype) + turned.real * turned.imag.sin() * keep


class Experts(nn.Module):
    """Rows go to experts by what is in them: some expert gets no rows, and another rank has it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 6)
        self.experts = nn.ModuleList(dense() for _ in range(6))

    def forward(self, x: torch.Tensor) -> Any:
        scores = self.gate(x).softmax(-1)
        best = scores.argmax(-1)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (best == index).nonzero()[:, 0]
            y = y.index_add(0, rows, expert(x[rows]) * scores[rows, index, None])
        empty = self.experts[0](x[:0])
        return y + empty.sum() + self.experts[1](x.new_zeros(0, 3, WIDTH)).sum()


class Tables(nn.Module):
    """Embeddings with sparse gradients, one of them used twice, before and behind modules of other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, WIDTH, sparse=True), nn.Embedding(7, WIDTH, sparse=True)
        self.bag = nn.EmbeddingBag(5, WIDTH, mode="mean", sparse=True)
        self.layers = nn.ModuleList(dense() for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        indices = (x.abs() * 5).long()
        y = self.layers[0](self.words(indices.clamp(max=10)).mean(1))
        z = self.layers[1](y + self.bag(indices.clamp(max=4))) + self.places(indices[:, 0].clamp(max=6))
        return self.layers[2](z) + self.words(indices[:, 1].clamp(max=10))


class Graph(nn.Module):
    """Multiplies by a sparse matrix, which is a plain attribute, the same object in every layer."""

    def __init__(self, adjacency: torch.Tensor) -> None:
        super().__init__()
        self.inner, self.adjacency = dense(), adjacency

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.sparse.mm(self.adjacency, self.inner(x).t()).t()
        return y


def graph() -> nn.Module:
    adjacency = torch.randn(WIDTH, WIDTH).relu().to_sparse()
    return nn.Sequential(*(Graph(adjacency) for _ in range(4)))


class Remembers(nn.Module):
    """Its state is a plain tensor that is written in place, not a buffer, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.state, self.calls = dense(), torch.zeros(WIDTH), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        with torch.no_grad():
            self.state.mul_(0.5).add_(y.mean(0))
        self.calls += 1
        return y + self.state.clone() / self.calls


ENTRIES: dict[str, Entry] = {
    "writes to inputs": module(
        "modules write in place to what they are given, in several ways, and some give it back",
        InPlace,
        spread("one", "two", "three", "four"),
    ),
    "views of one tensor": module(
        "two modules get views of one tensor, one of them writes, and the whole goes to a third",
        Halves,
        spread("before", "left", "right", "after"),
    ),
    "parameters as results": module(
        "modules give their own parameters back, and the loss is made of them",
        GivesParameters,
        spread(*numbered("layers")),
        phases=(Phase(body=decay_step),),
    ),
    "functions and generators as arguments": module(
        "a function with its caller's parameter in it, and a generator, are given to a child, which gives one back",
        lambda: nn.Sequential(*(HandsFunctions() for _ in range(4))),
        None,
    ),
    "nested dicts of lists": module(
        "arguments and results are dicts of lists of tuples of tensors and other things, some of them the same tensor",
        Nested,
        spread(*numbered("layers")),
    ),
    "values of many types": module(
        "named tuples, registered types, slices, shapes and types cross, and modules that return None",
        Types,
        lambda pp: {"model.many": 1, "model.nothing": 1},
        depths=(2,),
        phases=(Phase(body=types_step),),
    ),
    "complex, bool and bfloat16": module(
        "tensors of seven types cross together, and gradients of four of them cross back",
        Numbers,
        spread(*numbered("layers")),
    ),
    "experts without rows": module(
        "tensors without elements cross, and their gradients do",
        Experts,
        spread(*numbered("experts", 6)),
    ),
    "sparse gradients": module(
        "gradients of tables are sparse, are averaged over microbatches, and one sums two uses",
        Tables,
        spread("words", "layers.0", "bag", "layers.1", "places", "layers.2"),
    ),
    "sparse matrix": module(
        "every layer has the same sparse tensor as a plain attribute",
        graph,
        None,
    ),
    "plain tensor as state": module(
        "a forward writes in place to a tensor that the model does not know as a buffer",
        lambda: nn.Sequential(*(Remembers() for _ in range(4))),
        None,
    ),
}
