"""How modules hang together and in what order they run, which is for a model's code to decide, call by call."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tests.parity.models_control import WIDTH, dense

from .entry import Entry
from .entry_builders import module, numbered, spread


class PlainList(nn.Module):
    """Its layers are in a plain list and are registered one by one; a frozen helper is hidden in one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [dense() for _ in range(4)]
        for index, layer in enumerate(self.layers):
            self.add_module(f"layer{index}", layer)
        self.hidden = [dense().requires_grad_(False)]

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x) + 0.1 * self.hidden[0](x)
        return x


class MadeLater(nn.Module):
    """Layers whose sizes only the first batch tells, and a layer that the first forward makes."""

    def __init__(self, kind: type[nn.Module] = nn.LazyBatchNorm1d) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LazyLinear(WIDTH) for _ in range(3))
        self.norm = kind()
        self.head: nn.Module | None = None

    def forward(self, x: torch.Tensor) -> Any:
        if self.head is None:
            self.head = nn.Linear(x.shape[-1], WIDTH)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(self.norm(x))


def made_before() -> nn.Module:
    """Made as PyTorch asks for: one batch goes through before anything else is done with the model."""
    model = MadeLater()
    model(torch.ones(2, WIDTH))
    return model


class Tree(nn.Module):
    """Made of smaller ones of its own kind, each of which another rank may have."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.own = dense()
        self.left = Tree(depth - 1) if depth else None
        self.right = Tree(depth - 1) if depth else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.own(x)
        if self.left is None or self.right is None:
            return x
        result: torch.Tensor = self.left(x) * self.right(-x) + x
        return result


class Parser(nn.Module):
    """Calls itself on the parts of a nested structure, and its children on the way down and on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.leaf, self.up = dense(), dense(), nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.Tanh())

    def forward(self, state: torch.Tensor, tree: Any) -> torch.Tensor:
        if not isinstance(tree, tuple):
            leaf: torch.Tensor = self.leaf(state * tree)
            return leaf
        left, right = (self(self.down(state), part) for part in tree)
        both: torch.Tensor = self.up(torch.cat((left, right), -1))
        return both


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.parser, self.head = dense(), Parser(), dense()

    def forward(self, x: torch.Tensor) -> Any:
        tree = ((0.5, 1.0), (1.5, (2.0, 2.5)))
        return self.head(self.parser(self.embed(x), tree if x.sum() > 0 else tree[1]))


class Asks(nn.Module):
    """Calls a method of the module that calls it, which computes with another child."""

    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.inner = dense()
        self.parent = weakref.ref(parent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parent: Any = self.parent()
        result: torch.Tensor = self.inner(parent.context(self.inner(x)))
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Asks:
        raise RuntimeError("a copy would ask the wrong parent")


class CallsBack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = dense(), dense(), dense()
        self.asks = Asks(self)

    def context(self, x: torch.Tensor) -> Any:
        return self.shared(x) + x

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.asks(self.first(x)))


class UsesShared(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own, self.shared = dense(), shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.shared(self.own(x)) + self.own(self.shared(x))
        return result


class TwoParents(nn.Module):
    """One module under two names in two parents, which are on different ranks."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Sequential(dense(), dense())
        self.one, self.two, self.three = UsesShared(shared), UsesShared(shared), UsesShared(shared[1])

    def forward(self, x: torch.Tensor) -> Any:
        return self.three(self.two(self.one(x)))


class Routed(nn.Module):
    """The data choose which entries of a dictionary run, in which order and how often; one of them never does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: dense() for name in ("add", "scale", "turn", "keep")})
        self.never = nn.ModuleDict({"unused": dense()})

    def forward(self, x: torch.Tensor) -> Any:
        names = list(self.layers)
        order = [names[index] for index in x.detach().abs().sum(0)[: len(names)].argsort(stable=True)]
        for name in (*order, order[0], *reversed(order)):
            x = self.layers[name](x) + 0.5 * x
        if "unused" in self.layers:
            x = self.never["unused"](x)
        return x


class Backwards(nn.Module):
    """Children run in the reverse of the order in which they were made, then some of them again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(dense() for _ in range(6))

    def forward(self, x: torch.Tensor) -> Any:
        for layer in reversed(self.layers):
            x = layer(x)
        for layer in self.layers[1::2]:
            x = layer(x) + x
        return x


class Settles(nn.Module):
    """Repeats its layers until the state hardly moves: how often, the data decide."""

    rounds: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.one, self.two, self.leave = dense(), dense(), dense(), dense()
        self.register_buffer("rounds", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.enter(x)
        state = torch.zeros_like(x)
        for _ in range(12):
            before, state = state, 0.6 * self.two(self.one(state) + x)
            self.rounds += 1
            if (state - before).abs().max() < 0.05:
                break
        return self.leave(state)


class Exits(nn.Module):
    """Stops at the first layer that is sure enough: later ones get no gradient at all, or from some microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(dense() for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 3) for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        for index, (layer, head) in enumerate(zip(self.layers, self.heads, strict=True)):
            x = layer(x)
            scores = head(x)
            if index < 3 and scores.softmax(-1).max() > 0.55 + 0.05 * (x.sum() > 0):
                break
        return scores


class Ignored(nn.Module):
    """Some results are used by nobody, some only under ``no_grad``, some only in a detached sum."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three, self.four = dense(), dense(), dense(), dense()

    def forward(self, x: torch.Tensor) -> Any:
        y = self.one(x)
        self.two(y)
        with torch.no_grad():
            seen = self.three(y)
        z = self.four(y + seen)
        self.two(z.detach())
        return z + self.three(z).detach()


class Yields(nn.Module):
    """Its forward is driven by a generator of its own that yields between calls of children."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(dense() for _ in range(4))

    def states(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
            yield x

    def forward(self, x: torch.Tensor) -> Any:
        first, *others = self.states(x)
        return sum(others, first.sin())


class Sliced(nn.Module):
    """Takes parts of a ``Sequential``, which are new ``Sequential`` objects."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(dense() for _ in range(8)))

    def forward(self, x: torch.Tensor) -> Any:
        y = self.layers[5:](self.layers[:3](x))
        return nn.Sequential(*self.layers[3:5], nn.Tanh())(y) + self.layers[1](y)


ENTRIES: dict[str, Entry] = {
    "modules in a plain list": module(
        "children are called through a list that the model does not know, and one is not registered at all",
        PlainList,
        spread(*(f"layer{index}" for index in range(4))),
    ),
    "made lazily, one batch before": module(
        "parameters and a whole child were made by a first forward",
        made_before,
        spread("layers.0", "layers.1", "layers.2", "head"),
    ),
    "made lazily, no batch before": module(
        "parameters have no shape yet when the model is wrapped, and the optimizer could not get them",
        lambda: MadeLater(nn.Identity),
        None,
        refused="run a forward once so that the lazy module",
    ),
    "tree of modules": module("a module holds smaller ones of its own class, four levels deep", lambda: Tree(3), None),
    "recursion": module(
        "a module calls itself on nested structures, to a depth that the data decide",
        Recursive,
        spread("embed", "parser.down", "parser.leaf", "parser.up"),
    ),
    "child that calls its parent": module(
        "calls go from a rank to another and back, and there to a sibling",
        CallsBack,
        spread("first", "shared", "asks", "last"),
    ),
    "module of two parents": module(
        "a module has several names, in parents on different ranks, and a part of it a name of its own",
        TwoParents,
        lambda pp: {"model.one.shared.0": pp // 4, "model.two": pp - 1, "model.three": pp // 2},
    ),
    "ModuleDict, routed": module(
        "children run in an order, and as often, as the data say; one is never called",
        Routed,
        lambda pp: {**spread(*(f"layers.{n}" for n in ("add", "scale", "turn", "keep")))(pp), "model.never": pp - 1},
    ),
    "children out of order": module(
        "children run last first, so that a cut by order of creation would go to and fro",
        Backwards,
        None,
    ),
    "loop of unknown length": module(
        "a loop runs until the state settles, each time another number of rounds, counted in a buffer",
        Settles,
        spread("enter", "one", "two", "leave"),
    ),
    "early exit": module(
        "later layers run for some microbatches only, or for none: their gradients are then None",
        Exits,
        spread(*(name for pair in zip(numbered("layers"), numbered("heads"), strict=True) for name in pair)),
    ),
    "results used by nobody": module(
        "calls have results that no gradient reaches, though they were made with gradients",
        Ignored,
        spread("one", "two", "three", "four"),
    ),
    "generator in the forward": module(
        "the forward is suspended between two calls of children",
        Yields,
        spread(*numbered("layers")),
    ),
    "slices of a Sequential": module(
        "every forward makes new containers of the same layers",
        Sliced,
        None,
    ),
}
