"""A small model with places in it at which something can happen, and the same in one process."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import shardwright as smp
import torch
from torch import nn

WIDTH, BATCH, MICROBATCHES, PARTS = 6, 8, 2, 4
LEARNING_RATE = 0.1


class Place:
    """Calls an action at the second visit of a moment, or at the first of one that comes once."""

    def __init__(self) -> None:
        self.disarm()

    def disarm(self) -> None:
        self.moment: str | None = None
        self.action: Callable[[], Any] = lambda: None
        self.visits: Counter[str] = Counter()

    def arm(self, moment: str, action: Callable[[], Any], visit: int) -> None:
        self.disarm()
        self.moment, self.action, self.visit = moment, action, visit

    def visit_(self, moment: str) -> None:
        self.visits[moment] += 1
        if moment == self.moment and self.visits[moment] == self.visit:
            self.moment = None
            self.action()


place = Place()


class Trip(torch.autograd.Function):
    """The identity, whose backward is a place."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        place.visit_("backward")
        return gradient


class Part(nn.Module):
    """A layer, divided over tensor-parallel ranks where there are some."""

    def __init__(self, width: int) -> None:
        super().__init__()
        with smp.tensor_parallelism():
            self.linear = nn.Linear(width, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        place.visit_("forward")
        return Trip.apply(self.linear(inputs).tanh())  # type: ignore[no-any-return]


class Net(nn.Module):
    """Parts in a row, spread over the pipeline."""

    def __init__(self, extra: int = 0) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part(WIDTH) for _ in range(PARTS)])
        if extra:
            self.extra = nn.Linear(extra, extra)
        for number, part in enumerate(self.parts):
            smp.set_partition(part, number * smp.pp_size() // PARTS)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            inputs = part(inputs)
        return inputs


class Plain(nn.Module):
    """The same in one process."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Sequential() for _ in range(PARTS)])
        for part in self.parts:
            part.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            inputs = part.linear(inputs).tanh()
        return inputs


class Descent(torch.optim.SGD):
    """Gradient descent, one parameter after another, with a place behind each."""

    #: Or tensor-parallel ranks would wait for one another in each update.
    updates_elements_independently = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=group["lr"])
                        place.visit_("optimizer")


def train(model: Any, inputs: Any) -> Any:
    """The step function."""
    loss = model(inputs).square().mean()
    model.backward(loss)
    return loss


def train_otherwise(model: Any, inputs: Any) -> Any:
    """Another step function."""
    loss = model(inputs).abs().mean()
    model.backward(loss)
    return loss


class Training:
    """The model on this rank, the same whole, and steps of both."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.plain = Plain().double()
        self.batches = torch.Generator().manual_seed(11)
        self.step: Any = smp.step(train)
        self.other_step: Any = smp.step(train_otherwise)
        self.build()

    def build(self, extra: int = 0) -> None:
        """Divide the model anew, with the weights of the plain one."""
        net = Net(extra).double()
        net.load_state_dict(copy.deepcopy(self.plain.state_dict()), strict=False)
        self.model: Any = smp.DistributedModel(net)
        self.optimizer = smp.DistributedOptimizer(Descent(self.model.parameters(), lr=LEARNING_RATE))

    def draw(self) -> list[torch.Tensor]:
        """The batches of all data-parallel ranks."""
        draw = [torch.randn(BATCH, WIDTH, generator=self.batches, dtype=torch.float64) for _ in range(smp.dp_size())]
        return draw

    def take(self, batches: list[torch.Tensor]) -> float:
        """A step of the divided model; its loss."""
        return float(self.step(self.model, batches[smp.dp_rank()]).reduce_mean())

    def take_plain(self, batches: list[torch.Tensor]) -> float:
        """The same step in one process; this replica's loss."""
        self.plain.zero_grad()
        losses = [self.plain(batch).square().mean() for batch in batches]
        (sum(losses) / len(batches)).backward()  # type: ignore[union-attr]
        with torch.no_grad():
            for parameter in self.plain.parameters():
                parameter.sub_(parameter.grad, alpha=LEARNING_RATE)
        return float(losses[smp.dp_rank()])

    def exact_step(self) -> float:
        """A step of both, and an update of both; the largest relative error of the loss and of the weights."""
        batches = self.draw()
        loss = self.take(batches)
        self.optimizer.step()
        self.optimizer.zero_grad()
        expected = self.take_plain(batches)
        worst = abs(loss - expected) / max(abs(expected), 1e-3)
        wanted = self.plain.state_dict()
        for name, value in self.model.state_dict().items():
            if name in wanted:
                worst = max(worst, float((value - wanted[name]).abs().max()))
        return worst
