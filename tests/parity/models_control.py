"""Control flow and structure: conditionals, losses at several depths, sharing, freezing, nesting and repetition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .problem import BATCH, Models, Phase, Problem, normal, one, square_loss

WIDTH = 6


def dense() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def pins(**ranks: Callable[[int], int] | int) -> Callable[[int], dict[str, int]]:
    """Pins by a module's name in ``"model"``; a function says the rank by pipeline degree."""
    return lambda pp: {
        f"model.{name.replace('__', '.')}": rank(pp) if callable(rank) else rank for name, rank in ranks.items()
    }


def last(pp: int) -> int:
    """The last rank of three; with two ranks the first, so that both hold something."""
    return 2 % pp


class Conditional(nn.Module):
    """Which module runs depends on the data, and on another replica or microbatch it may be the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.positive, self.negative, self.after = dense(), dense(), dense(), dense()

    def forward(self, x: torch.Tensor) -> Any:
        x = self.before(x)
        x = self.positive(x) if x.sum() > 0 else self.negative(x)
        return self.after(x)


class Skip(nn.Module):
    """What the first stage computes is used again two stages later."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = dense(), dense(), dense()
        self.head = nn.Linear(2 * WIDTH, 3)

    def forward(self, x: torch.Tensor) -> Any:
        first = self.one(x)
        third = self.three(self.two(first) + x)
        return self.head(torch.cat((first, third), dim=1))


class Tied(nn.Module):
    """One parameter in two modules, one of which uses it transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, WIDTH, bias=False)
        self.between = dense()
        self.decode = Transposed(self.encode.weight)
        self.again = dense()

    def forward(self, x: torch.Tensor) -> Any:
        return self.again(self.decode(self.between(self.encode(x))))


class Transposed(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight.t())


class TwoHeads(nn.Module):
    """Losses from different depths."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = dense(), dense(), dense()
        self.early, self.late = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> Any:
        first = self.one(x)
        early = self.early(first)
        return early.square().mean(), self.late(self.three(self.two(first))).square().mean()


class Chain(nn.Module):
    """Three stages in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = dense(), dense(), dense()

    def forward(self, x: torch.Tensor) -> Any:
        return self.three(self.two(self.one(x)))


class Middle(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.enter, self.inner, self.leave = dense(), inner, dense()

    def forward(self, x: torch.Tensor) -> Any:
        return self.leave(self.inner(self.enter(x)) + x)


def nested() -> nn.Module:
    """Spanning modules in each other: 0 calls 1, which calls 2, which calls 0 again."""
    return Middle(Middle(Middle(dense())))


def nested_pins(pp: int) -> dict[str, int]:
    inner = "model.inner"
    return {inner: 1, f"{inner}.inner": pp - 1, f"{inner}.inner.enter": 1, f"{inner}.inner.inner": 0}


class Repeated(nn.Module):
    """One module visited many times, its results mixed."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.mix = nn.Linear(2 * WIDTH, WIDTH), dense()

    def forward(self, x: torch.Tensor) -> Any:
        state = torch.zeros_like(x)
        seen = []
        for index in range(4):
            state = torch.tanh(self.cell(torch.cat((x, state), dim=1)))
            seen.append(state)
            if index % 2:
                state = self.mix(state)
        return torch.stack(seen).sum(0) + state


class Branches(nn.Module):
    """Independent calls that may run at the same time, and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(dense() for _ in range(4))
        self.gate = nn.Linear(WIDTH, 4)
        self.unused = dense()

    def forward(self, x: torch.Tensor) -> Any:
        weights = self.gate(x).softmax(-1)
        parts = [branch(x) * weights[:, i : i + 1] for i, branch in enumerate(self.branches)]
        self.branches[0](x)  # a result that nothing uses
        return sum(parts)


class Checkpointed(nn.Module):
    """Checkpointing in the parent's code around modules of other ranks."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.one, self.two, self.three = dense(), dense(), dense()

    def forward(self, x: torch.Tensor) -> Any:
        x = checkpoint(self.two, self.one(x), use_reentrant=self.reentrant)
        return checkpoint(self.both, x, use_reentrant=self.reentrant)

    def both(self, x: torch.Tensor) -> Any:
        return self.two(self.three(x)) + x


class Hooked(nn.Module):
    """Hooks on tensors of the parent and on a remote result change gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = dense(), dense()

    def forward(self, x: torch.Tensor) -> Any:
        first = self.one(x) * 2
        first.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))
        second = self.two(first)
        second.register_hook(lambda gradient: gradient * 3)
        return second + first.sin() + second.cos()


class Lookup(nn.Module):
    """A sparse embedding elsewhere: its gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH, sparse=True)
        self.head = dense()

    def forward(self, x: torch.Tensor) -> Any:
        indices = (x.abs() * 5).long().clamp(max=10)
        return self.head(self.table(indices).mean(1))


class Recurrent(nn.Module):
    """Recurrent and attention modules of PyTorch, whole on other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = dense()

    def forward(self, x: torch.Tensor) -> Any:
        x, (hidden, cell) = self.lstm(x)
        x, weights = self.attention(x, x, x, need_weights=True)
        return self.head(x).sum(1) + hidden[-1] * cell[0] + weights.square().mean()


def frozen(which: tuple[str, ...]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = Chain()
        for name in which:
            model.get_submodule(name).requires_grad_(False)
        return model

    return build


def long_runs() -> nn.Module:
    return nn.Sequential(*(module for _ in range(12) for module in dense()))


def long_run_pins(pp: int) -> dict[str, int]:
    return {f"model.{index}": min(index // 4 % 3, pp - 1) for index in range(24)}


def long_run_requests(pp: int) -> int:
    """Runs of four modules on ranks 0, 1, 2, 0, 1, 2 (or 0, 1, 1, 0, 1, 1): one request for each elsewhere."""
    return 4 if pp == 3 else 2


class Remembering(nn.Module):
    """Keeps in attributes what it needs again after other ranks have computed."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.one(x)
        self.scale = x.square().mean()
        y = self.two(torch.relu(self.kept))
        z = self.three(y * self.scale)
        result: torch.Tensor = z + self.kept * y
        return result


def sum_of_losses(models: Models, x: torch.Tensor) -> Any:
    early, late = models["model"](x)
    models["model"].backward(early + 0.5 * late)
    return early, late


def one_backward_of_two_losses(models: Models, x: torch.Tensor) -> Any:
    early, late = models["model"](x)
    outputs = early.detach().clone(), late.detach().clone()
    models["model"].backward([early, late], [torch.tensor(2.0), None])
    return outputs


def two_backwards(models: Models, x: torch.Tensor) -> Any:
    model = models["model"]
    first = model(x)[0]
    second = model(x.flip(0))[1]
    model.backward(first)
    model.backward(second)
    return first, second


def backward_twice_in_turn(models: Models, x: torch.Tensor) -> Any:
    model = models["model"]
    first = model(x)
    model.backward(first, torch.ones_like(first))
    second = model(first.detach() + 1)
    model.backward(second.square().sum())
    return first, second


def tokens(step: int, random: torch.Generator) -> tuple[torch.Tensor, ...]:
    return (torch.randn(BATCH, 5, WIDTH, generator=random),)


def simple(build: Callable[[], nn.Module], where: Callable[[int], dict[str, int]], **options: Any) -> Problem:
    """A problem of one model of one tensor."""
    settings: dict[str, Any] = {"batch": normal(WIDTH), "phases": (Phase(body=square_loss),), **options}
    return Problem(build=one(build), pins=where, **settings)


chain_pins = pins(two=1, three=last)
two_head_pins = pins(two=1, early=1, three=last)

PROBLEMS = {
    "attributes kept between calls": simple(Remembering, chain_pins),
    "conditional": simple(Conditional, pins(positive=1, negative=last)),
    "skip over two stages": simple(Skip, pins(two=1, three=last, head=last)),
    "shared parameter": simple(Tied, pins(encode=1, decode=1, again=last)),
    "two losses, summed": simple(TwoHeads, two_head_pins, phases=(Phase(body=sum_of_losses),)),
    "two losses, one backward": simple(TwoHeads, two_head_pins, phases=(Phase(body=one_backward_of_two_losses),)),
    "two losses, two backwards": simple(TwoHeads, two_head_pins, phases=(Phase(body=two_backwards),)),
    "two backwards in turn": simple(Chain, chain_pins, phases=(Phase(body=backward_twice_in_turn),)),
    "frozen first half": simple(frozen(("one", "two")), chain_pins),
    "frozen second half": simple(frozen(("two", "three")), chain_pins),
    "nested spanning": simple(nested, nested_pins),
    "visited many times": simple(Repeated, pins(cell=1, mix=last)),
    "branches": simple(Branches, lambda pp: {f"model.branches.{i}": i % pp for i in range(4)} | {"model.unused": 1}),
    "checkpoint": simple(lambda: Checkpointed(False), chain_pins),
    "checkpoint, reentrant": simple(lambda: Checkpointed(True), chain_pins),
    "hooks": simple(Hooked, pins(one=1, two=last)),
    "sparse gradient": simple(Lookup, pins(table=1, head=last)),
    "LSTM and attention": simple(Recurrent, pins(lstm=1, attention=last), batch=tokens),
    "long runs": simple(long_runs, long_run_pins, requests=long_run_requests),
    "stage without parameters": simple(Chain, lambda pp: {"model.three": 2}),
    "root without parameters": simple(Chain, lambda pp: {"model.one": 1, "model.two": 1, "model.three": 2}),
}
