"""Models with what a second computation can get wrong: random numbers, state, attention, structures, shared weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import shardwright as smp
import torch
from torch import nn

from tests.parity import models_language, models_vision
from tests.parity.problem import Phase as StepPhase
from tests.parity.problem import Problem, normal, one, square_loss

WIDTH = 6
LARGE = 72
LENGTH = 12
NUM_LAYERS = 5


class Dense(nn.Module):
    """A layer with a dropout."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 2 * width)
        self.dropout = nn.Dropout(0.25)
        self.outer = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(self.dropout(torch.tanh(self.inner(x))))


class Layers(nn.Module):
    """Layers one after another, between two others."""

    def __init__(self, *layers: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.calls = False
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = smp.checkpoint_sequential(self.layers, x, "group_2") if self.calls else self.layers(x)
        last: Any = smp.checkpoint if self.calls else _called
        return torch.as_tensor(last(self.last, x * x))


def _called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


class Counting(nn.Module):
    """What it computes depends on what its earlier calls have left, in every way of keeping something."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("level", torch.zeros(WIDTH))
        self.count, self.seen = 0, [0.5]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.seen.append(self.count * 0.25)
        self.level.mul_(0.5).add_(x.detach().mean(0))
        y = torch.tanh(self.norm(self.inner(x)))
        return y * (1 + 0.1 * len(self.seen)) + self.level.clone() * y / self.count


class Attention(nn.Module):
    """Attention with dropout and a bias that is an argument by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.25, batch_first=True)
        self.dense = Dense()

    def forward(self, x: torch.Tensor, *, bias: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, x, x, attn_mask=bias, need_weights=False)[0]
        return torch.as_tensor(self.dense(x))


class Attentive(nn.Module):
    """Layers of attention that share a trained bias."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = False
        self.bias = nn.Embedding(LENGTH, LENGTH)
        self.layers = nn.ModuleList(Attention() for _ in range(3))
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), Dense(), nn.Tanh(), nn.Linear(WIDTH, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias(torch.arange(LENGTH))
        call: Any = smp.checkpoint if self.calls else _called
        for layer in self.layers:
            x = call(layer, x, bias=bias)
        return torch.as_tensor(call(self.head, x))


class Structured(nn.Module):
    """Takes and returns structures, among which are None, the same tensor twice, and one that it writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = Dense(), Dense()

    def forward(self, given: dict[str, Any], *more: Any, scale: float) -> tuple[Any, ...]:
        a, (b, nothing) = given["a"], given["b"]
        assert nothing is None
        assert more[0] is more[1][0]
        a.mul_(scale)
        return {"a": self.inner(a) + b, "b": [self.outer(b * more[0]), None]}, None, a


class Structures(nn.Module):
    """Modules that pass structures on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = False
        self.layers = nn.ModuleList(Structured() for _ in range(3))
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Dense())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        call: Any = smp.checkpoint if self.calls else _called
        given: Any = {"a": x * 2, "b": [x + 1, None]}
        total = x
        for layer in self.layers:
            written = given["a"] * 1
            given = {**given, "a": written}
            given, nothing, again = call(layer, given, x, [x], scale=0.5)
            assert nothing is None
            total = total + again + written
        return torch.as_tensor(call(self.head, total + given["a"] + given["b"][0]))


class Shared(nn.Module):
    """One module that is called several times, once without gradients, and others that share its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = False
        self.layers = nn.Sequential(Dense(), Dense(), Dense())
        self.again = nn.Linear(WIDTH, 2 * WIDTH)
        self.again.weight = self.layers[1].inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        call: Any = smp.checkpoint if self.calls else _called
        with torch.no_grad():
            x = x + call(self.layers[0], x)
        x = call(self.layers, x)
        x = call(self.layers[1], x)
        return torch.as_tensor(call(self.again, call(self.layers, x)))


class Odd(nn.Module):
    """Layers of odd sizes, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = False
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.first, self.last = nn.Linear(WIDTH, 7), nn.Linear(7, 3)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(7, 40), nn.Tanh(), nn.Linear(40, 7)) for _ in range(4)])
        self.never = nn.Linear(7, 31)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x * self.scale))
        for layer in self.layers:
            x = x + layer(x)
        return torch.as_tensor(self.last(x))


def evaluate(models: Any, x: torch.Tensor) -> Any:
    """A step function without a backward."""
    return models["model"](x)


def pins(*names: str, inside: str = "") -> Any:
    """Modules that take turns with ranks, and one part of another rank than the module that it is in."""

    def places(pp: int) -> dict[str, int]:
        found = {f"model.{name}": index % pp for index, name in enumerate(names)}
        return {
            **found,
            **({f"model.{inside}": (found[f"model.{inside.rpartition('.')[0]}"] + 1) % pp} if inside else {}),
        }

    return places


_LAYERS = [f"layers.{index}" for index in range(NUM_LAYERS)]
_STEP = (StepPhase(body=square_loss),)

_ODD = Problem(
    build=one(Odd),
    batch=normal(WIDTH),
    phases=_STEP,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1),
    pins=pins("first", *(f"layers.{index}" for index in range(4)), "last"),
)

PROBLEMS: dict[str, Problem] = {
    "layers": Problem(
        build=one(lambda: Layers(*(Dense() for _ in range(NUM_LAYERS)))),
        batch=normal(WIDTH),
        phases=_STEP,
        pins=lambda pp: (
            {f"model.layers.{i}": i * pp // NUM_LAYERS for i in range(NUM_LAYERS)}
            | {"model.layers.1.outer": (NUM_LAYERS * pp // NUM_LAYERS - 1) % pp}
        ),
    ),
    "layers with state": Problem(
        build=one(lambda: Layers(Counting(), Dense(), Counting(), Dense(), Counting())),
        batch=normal(WIDTH),
        phases=_STEP,
        pins=pins("first", *_LAYERS, "last"),
    ),
    "large layers": Problem(
        build=one(lambda: Layers(*(Dense(LARGE) for _ in range(NUM_LAYERS)), width=LARGE)),
        batch=normal(64, LARGE),
        phases=_STEP,
        pins=pins("first", *_LAYERS, "last", inside="layers.2.inner"),
    ),
    "attention": Problem(
        build=one(Attentive),
        batch=normal(LENGTH, WIDTH),
        phases=_STEP,
        pins=pins("bias", "layers.0", "layers.1", "layers.2", "head.0", "head.1", inside="layers.1.dense"),
    ),
    "structures": Problem(
        build=one(Structures),
        batch=normal(WIDTH),
        phases=_STEP,
        pins=pins("layers.0", "layers.1", "layers.2", "head", inside="layers.1.inner"),
    ),
    "shared": Problem(
        build=one(Shared),
        batch=normal(WIDTH),
        phases=_STEP,
        pins=lambda pp: {"model.layers.0": 1 % pp, "model.layers.1": 0, "model.again": 0, "model.layers.2": pp - 1},
    ),
    **{name: models_language.PROBLEMS[name] for name in ("GPT-2", "T5", "BERT", "Llama")},
    "odd MLP": _ODD,
    "odd MLP, accumulated": dataclasses.replace(
        _ODD,
        phases=(
            StepPhase(body=square_loss, update=()),
            StepPhase(body=square_loss, zero=()),
            StepPhase(body=evaluate, training=False, zero=(), update=()),
        ),
    ),
    "ResNet, in-place": models_vision.PROBLEMS["ResNet, in-place"],
}
