"""A model with parameters of every size, optimizers, and what is compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import shardwright as smp
import torch
from shardwright.optimizer.offloading import chunks, on_device, pieces
from torch import nn

WIDTH = 6


class Uneven(nn.Module):
    """Parameters above and below a page and a chunk, of one element and of none, and one that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0))
        self.inner = nn.Linear(WIDTH, 131)
        self.middle = nn.Linear(131, 97)
        self.seldom = nn.Linear(131, 97)
        self.outer = nn.Linear(97, 3, bias=False)

    def forward(self, x: torch.Tensor, seldom: bool = False) -> torch.Tensor:
        x = torch.tanh(self.inner(x * self.scale))
        x = self.middle(x) + self.seldom(x) if seldom else self.middle(x)
        return torch.as_tensor(self.outer(torch.tanh(x)) + self.nothing.sum())


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda groups, **keys: torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.01, **keys),
    "nesterov": lambda groups, **keys: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True, **keys),
    "sgd without momentum": lambda groups, **keys: torch.optim.SGD(groups, lr=0.05, **keys),
    "adam": lambda groups, **keys: torch.optim.Adam(groups, lr=0.01, weight_decay=0.1, **keys),
    "adamw": lambda groups, **keys: torch.optim.AdamW(groups, lr=0.01, amsgrad=True, **keys),
    "adagrad": lambda groups, **keys: torch.optim.Adagrad(groups, lr=0.05, lr_decay=0.1, **keys),
    "rmsprop": lambda groups, **keys: torch.optim.RMSprop(groups, lr=0.01, momentum=0.5, centered=True, **keys),
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
    "adafactor": lambda groups, **keys: torch.optim.Adafactor(_with_elements(groups), **keys),
}


def _with_elements(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out what has no elements, of which Adafactor takes a mean."""
    return [{**group, "params": [one for one in group["params"] if one.numel()]} for group in groups]


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    """Two groups with settings of their own."""
    parameters = list(module.parameters())
    return [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.02}]


def small_chunks(chunk_bytes: int = 20_000, elements: int = 64) -> None:
    """Have chunks that a small model has several of, and cut its parameters."""
    chunks.CHUNK_BYTES, chunks.CUT_ELEMENTS = chunk_bytes, elements


class CountedPieces:
    """Counts the pieces that are updated, until :meth:`end`."""

    def __init__(self) -> None:
        self.number = 0
        self._undo: list[tuple[Any, str, Any]] = []
        for owner, name in ((pieces.Pieces, "make"), (on_device.DeviceChunks, "_given")):
            self._count(owner, name)

    def _count(self, owner: Any, name: str) -> None:
        called = getattr(owner, name)

        def counted(this: Any, part: chunks.Part, *args: Any) -> Any:
            self.number += part.end is not None
            return called(this, part, *args)

        self._undo.append((owner, name, called))
        setattr(owner, name, counted)

    def end(self) -> int:
        """Return their number."""
        for owner, name, called in self._undo:
            setattr(owner, name, called)
        return self.number


def wrap(optimizer: torch.optim.Optimizer) -> Any:
    """Make it distributed."""
    made: Any = smp.DistributedOptimizer
    return made(optimizer)


def same(one: Any, other: Any, where: str = "") -> None:
    """Raise unless two state dicts have the same keys, numbers, dtypes and strides."""
    if isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for place, (left, right) in enumerate(zip(one, other, strict=True)):
            same(left, right, f"{where}.{place}")
    elif isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride()), where
        assert torch.equal(one, other), f"{where}: {(one - other).abs().max()}"
    else:
        assert one == other, where
