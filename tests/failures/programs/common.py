"""What the programs of this folder share: a small model in two stages, armed faults, and words to the test."""

from __future__ import annotations

import copy
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import shardwright as smp
import torch
from torch import nn

WIDTH = 6
BATCH = 16
MICROBATCHES = 4


class ScriptError(Exception):
    """The script's own exception."""


def say(event: str, **fields: Any) -> None:
    """Tell the test something."""
    sys.stdout.write(json.dumps({"event": event, "at": time.monotonic(), **fields}) + "\n")
    sys.stdout.flush()


def await_word() -> str:
    """Wait for a line from the test."""
    return sys.stdin.readline().strip()


class Fault:
    """Calls an action at the n-th visit of a place."""

    def __init__(self) -> None:
        self.disarm()

    def disarm(self) -> None:
        self.place: tuple[str, str] | None = None
        self.visits: Counter[tuple[str, str]] = Counter()
        self.action: Callable[[], Any] = lambda: None

    def arm(self, name: str, phase: str, action: Callable[[], Any], visit: int = 2) -> None:
        self.disarm()
        self.place, self.visit, self.action = (name, phase), visit, action

    def visited(self, name: str, phase: str) -> Any:
        place = (name, phase)
        self.visits[place] += 1
        if place == self.place and self.visits[place] == self.visit:
            return self.action()
        return None


fault = Fault()


def raise_script_error() -> None:
    raise ScriptError("deliberate failure")


class Trip(torch.autograd.Function):
    """The identity, whose backward visits a place."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        fault.visited(ctx.name, "backward")
        return gradient, None


class Part(nn.Module):
    """A layer with buffers, which also draws from the random number generator."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None)

    def forward(self, inputs: torch.Tensor, extra: Any = None) -> Any:
        torch.empty(1).uniform_()
        result = fault.visited(self.name, "forward")
        if result is not None:
            return result
        return Trip.apply(self.norm(self.linear(inputs)).tanh(), self.name)


class Around(nn.Module):
    """A module on one rank whose child is on another."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.outer = Part(name)
        self.inner = Part("inner")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(self.outer(inputs))


class Net(nn.Module):
    """first and inner on pp_rank 0, second on pp_rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Part("first")
        self.second = Around("second")
        self.third = Part("third")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        hidden = self.second(hidden)
        extra = fault.visited("net", "argument")
        return self.third(hidden) if extra is None else self.third(hidden, extra)


class TrainingJob:
    """The model on this rank, the same model whole, and steps of both."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(3)
        net = Net().double()
        self.whole = copy.deepcopy(net)
        if smp.pp_size() > 1:
            smp.set_partition(net, 0)
            smp.set_partition(net.second, 1)
            smp.set_partition(net.second.inner, 0)
            smp.set_partition(net.third, 1)
        self.model = smp.DistributedModel(net, **options)
        self.batches = torch.Generator().manual_seed(11)
        self.train: Any = smp.step(train)

    def draw(self) -> list[torch.Tensor]:
        """The batches of all replicas."""
        return [torch.randn(BATCH, WIDTH, generator=self.batches, dtype=torch.float64) for _ in range(smp.dp_size())]

    def step(self) -> float:
        """A step of the divided model, of this replica's batch."""
        batches = self.draw()
        return float(self.train(self.model, batches[smp.dp_rank()]).reduce_mean())

    def exact_step(self) -> float:
        """A step of both models, and an update of both; the largest relative difference of gradients and buffers."""
        self.model.zero_grad()
        batches = self.draw()
        self.train(self.model, batches[smp.dp_rank()])
        state = torch.get_rng_state()
        self.whole.zero_grad()
        for replica, batch in enumerate(batches):
            before = [buffer.clone() for buffer in self.whole.buffers()]
            for microbatch in batch.chunk(MICROBATCHES):
                (self.whole(microbatch).square().mean() / MICROBATCHES / len(batches)).backward()
            if replica > 0:  # only the first replica's statistics last
                for buffer, value in zip(self.whole.buffers(), before, strict=True):
                    buffer.copy_(value)
        torch.set_rng_state(state)
        expected = {name: parameter.grad for name, parameter in self.whole.named_parameters()}
        found = {name: parameter.grad for name, parameter in self.model.local_named_parameters()}
        if smp.dp_rank() == 0:
            expected |= dict(self.whole.named_buffers())
            found |= dict(self.model.local_named_buffers())
        scale = max(float(value.abs().max()) for value in expected.values() if value is not None)
        worst = 0.0
        for name, value in found.items():
            wanted = expected[name]
            assert value is not None, f"{name} has no gradient"
            assert wanted is not None
            size = max(float(wanted.abs().max()), 1e-3 * scale)
            worst = max(worst, float((value - wanted).abs().max()) / size)
        with torch.no_grad():  # by hand: importing torch's optimizers takes seconds
            for parameter in [*self.whole.parameters(), *self.model.local_parameters()]:
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
        return worst

    def state(self) -> list[torch.Tensor]:
        """What a failed step must leave as it was."""
        tensors = [tensor.detach().clone() for _, tensor in self.model.local_named_parameters()]
        tensors += [buffer.clone() for _, buffer in self.model.local_named_buffers()]
        tensors += [p.grad.clone() for p in self.model.local_parameters() if p.grad is not None]
        return [*tensors, torch.get_rng_state()]


def train(model: Any, inputs: Any) -> Any:
    """The step function."""
    torch.empty(1).uniform_()
    fault.visited("step function", "forward")
    loss = model(inputs).square().mean()
    model.backward(loss)
    fault.visited("step function", "after backward")
    return loss


def describe(error: BaseException) -> dict[str, Any]:
    """An exception as the test sees it."""
    names = ("rank", "host", "module", "microbatch", "phase", "kind", "message", "traceback")
    return {
        "type": type(error).__name__,
        "bases": [base.__name__ for base in type(error).__mro__],
        "text": str(error),
        "notes": getattr(error, "__notes__", []),
        **{name: getattr(error, name, None) for name in names},
    }


def start(**keys: Any) -> TrainingJob:
    """Join the job, and build the model."""
    options = keys.pop("model_options", {})
    torch.set_num_threads(1)
    keys = {"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES, "skip_tracing": True, **keys}
    smp.init(keys)
    return TrainingJob(**options)
