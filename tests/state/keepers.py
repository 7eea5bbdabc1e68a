"""Modules that keep something from one microbatch to the next, as people write them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from shardwright.model.remote_attribute import RemoteAttribute
from shardwright.model.sentinel import is_sentinel
from torch import nn


class Keeper(nn.Module):
    """A layer with a weight, for modules that keep something beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.keep(width)

    def keep(self, width: int) -> None:
        """Make what the module keeps."""

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.weight)


class AverageInTwoOperations(Keeper):
    """A buffer, changed in two operations around the first look at the argument."""

    def keep(self, width: int) -> None:
        self.register_buffer("average", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.average.mul_(0.9).add_(x.mean(0))
        return self.scaled(x) + self.average


class AverageAssigned(Keeper):
    """A buffer that is replaced."""

    def keep(self, width: int) -> None:
        self.register_buffer("average", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return self.scaled(x) + self.average


class AverageByLerp(Keeper):
    """A buffer, changed in one operation."""

    def keep(self, width: int) -> None:
        self.register_buffer("average", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average.lerp_(x.detach().mean(0), 0.1)
        return self.scaled(x) + self.average


class Warmup(Keeper):
    """A Python number that decides how much of the argument goes into a buffer."""

    def keep(self, width: int) -> None:
        self.seen = 0
        self.register_buffer("average", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        decay = min(0.99, (1 + self.seen) / (10 + self.seen))
        self.average.mul_(decay).add_(x.detach().mean(0), alpha=1 - decay)
        return self.scaled(x) - self.average


class Quantiser(Keeper):
    """Vector quantisation, which computes with its codes before it looks at the argument."""

    def keep(self, width: int) -> None:
        self.register_buffer("codes", torch.rand(5, width) - 0.5)
        self.register_buffer("counts", torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        squares = self.codes.pow(2).sum(1)
        z = self.scaled(x)
        nearest = (squares - 2 * z @ self.codes.t()).argmin(1)
        chosen = nn.functional.one_hot(nearest, 5).to(z.dtype)
        with torch.no_grad():
            self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.codes.mul_(0.9).add_(chosen.t() @ z, alpha=0.1)
        return z + (self.codes[nearest] - z).detach()


class PythonAverage(Keeper):
    """A Python float."""

    def keep(self, width: int) -> None:
        self.level = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.level = 0.9 * self.level
        y = self.scaled(x)
        self.level += 0.1 * float(y.detach().abs().mean())
        return y / self.level


class PythonCounter(Keeper):
    """A Python number that is read again after the first look at the argument."""

    def keep(self, width: int) -> None:
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.scaled(x)
        return y / self.calls


class BufferCounter(Keeper):
    """A counter that is a buffer."""

    def keep(self, width: int) -> None:
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.scaled(x) / self.calls


class Past(Keeper):
    """A list of what came."""

    def keep(self, width: int) -> None:
        self.past: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number = len(self.past)
        y = self.scaled(x) + number
        self.past.append(y.detach().mean(0))
        return y + torch.stack(self.past).mean(0)


class Window(Keeper):
    """A deque of the last three."""

    def keep(self, width: int) -> None:
        self.window: deque[torch.Tensor] = deque(maxlen=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = sum(self.window) if self.window else 0.0
        y = self.scaled(x) + before
        self.window.append(y.detach().mean(0))
        return y


class Queue(Keeper):
    """A queue of keys with a pointer, as contrastive learning has it."""

    def keep(self, width: int) -> None:
        self.register_buffer("queue", torch.rand(7, width))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        place = int(self.pointer)
        y = self.scaled(x)
        negatives = y @ self.queue.clone().t()
        self.queue[place] = y.detach().mean(0)
        self.pointer[...] = (place + 1) % 7
        return y + negatives.mean(1, keepdim=True)


class Previous(Keeper):
    """The value before this one."""

    def keep(self, width: int) -> None:
        self.register_buffer("previous", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.previous.clone()
        y = self.scaled(x) + before
        self.previous.copy_(y.detach().mean(0))
        return y


class Statistics:
    """An object of the user's own."""

    def __init__(self) -> None:
        self.count = 0
        self.sums: dict[str, float] = {"all": 0.0}


class Tracker(Keeper):
    """An object that a module holds."""

    def keep(self, width: int) -> None:
        self.statistics = Statistics()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.statistics.count += 1
        y = self.scaled(x)
        self.statistics.sums["all"] += float(y.detach().sum())
        return y * (1 + self.statistics.sums["all"] / self.statistics.count / 100)


class PlainTensor(Keeper):
    """A tensor that is no buffer, written in place."""

    def keep(self, width: int) -> None:
        self.average = torch.zeros(width, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average.mul_(0.5)
        self.average.add_(x.detach().mean(0))
        return self.scaled(x) + self.average


class Normalised(Keeper):
    """torch's own batch normalisation."""

    def keep(self, width: int) -> None:
        self.norm = nn.BatchNorm1d(width, momentum=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.scaled(x))


class Counter(nn.Module):
    """Counts its calls, and keeps nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self) -> int:
        self.calls += 1
        return self.calls


KEEPERS: list[Callable[[int], nn.Module]] = [
    AverageInTwoOperations,
    AverageAssigned,
    AverageByLerp,
    Warmup,
    Quantiser,
    PythonAverage,
    PythonCounter,
    BufferCounter,
    Past,
    Window,
    Queue,
    Previous,
    Tracker,
    PlainTensor,
    Normalised,
]


def kept(module: nn.Module) -> dict[str, Any]:
    """What the modules that run here keep, as plain values that can be compared."""
    found: dict[str, Any] = {}
    for name, part in module.named_modules():
        for key, value in [*part._buffers.items(), *vars(part).items()]:
            if key.startswith("_") or key in ("training", "forward") or isinstance(value, (nn.Module, RemoteAttribute)):
                continue
            if value is not None and not is_sentinel(value):
                found[f"{name}.{key}"] = plain(value)
    return found


def plain(value: Any) -> Any:
    """A value without references to what the module goes on changing."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple, deque)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return plain(vars(value)) if hasattr(value, "__dict__") and not callable(value) else value
