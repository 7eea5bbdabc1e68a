"""Writes to buffers that torch counts no version for, of what a backward of the same microbatch needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shardwright.execution.state_order import StateOrder
from torch import nn

from tests.frames.job import Job, job_fixture
from tests.state.keepers import Counter, Keeper, Normalised
from tests.state.running import MODES, SCHEDULES, SIZES, check

job = job_fixture(2)


class Chain(nn.Module):
    """A module that keeps something, between two layers on another rank."""

    def __init__(self, width: int, keeper: Any) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.keeper = keeper(width)
        self.last = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.keeper(self.first(x)))


class Scaled(Keeper):
    """A scale that is averaged past its version, after it was used."""

    def keep(self, width: int) -> None:
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.scaled(x) * self.scale
        self.write(y.detach().mean(0).abs())
        return y

    def write(self, mean: torch.Tensor) -> None:
        self.scale.data.mul_(0.9).add_(mean, alpha=0.5)


class Exchanged(Scaled):
    """Another tensor's values are put into it."""

    def write(self, mean: torch.Tensor) -> None:
        self.scale.data = self.scale.data * 0.9 + 0.5 * mean


class UsedPast(Scaled):
    """It is used past its version too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.scaled(x) * self.scale.data
        self.write(y.detach().mean(0).abs())
        return y


class Evaluated(Keeper):
    """A batch normalisation that is used in evaluation mode before it learns from the same values."""

    def keep(self, width: int) -> None:
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.scaled(x)
        return self.evaluated(x) + self.norm(x).tanh()

    def evaluated(self, x: torch.Tensor) -> torch.Tensor:
        self.norm.eval()
        y = self.norm(x)
        self.norm.train()
        return y


class EvaluatedLater(Evaluated):
    """The same in a branch that the first step does not take; both modes are seen in every forward."""

    def keep(self, width: int) -> None:
        super().keep(width)
        self.counter = Counter()

    def evaluated(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(self.counter() > 5 and torch.is_grad_enabled()):
            return super().evaluated(x)


class Divided(Keeper):
    """Computes with the statistics of a batch normalisation."""

    def keep(self, width: int) -> None:
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.scaled(x) / self.norm.running_var
        return self.norm(y)


class Plain(Keeper):
    """A scale that is no buffer, in an attribute and in a list, and is written to past its version."""

    def keep(self, width: int) -> None:
        self.scale = torch.ones(width, dtype=torch.float64)
        self.listed = [torch.ones(width, dtype=torch.float64)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.scaled(x) * self.scale * (1 + self.listed[0])
        for scale in (self.scale, self.listed[0]):
            self.write(scale, y.detach().mean(0).abs())
        return y

    def write(self, scale: torch.Tensor, mean: torch.Tensor) -> None:
        scale.data.mul_(0.9).add_(mean, alpha=0.5)


class PlainOut(Plain):
    """The same as the destination of an operation."""

    def write(self, scale: torch.Tensor, mean: torch.Tensor) -> None:
        torch.add(scale.data * 0.9, mean, alpha=0.5, out=scale.data)


class PlainExchanged(Plain):
    """Another tensor's values are put into it."""

    def write(self, scale: torch.Tensor, mean: torch.Tensor) -> None:
        scale.data = scale.data * 0.9 + 0.5 * mean


class PlainSet(Plain):
    """It is set to another tensor's memory, before it is used: torch counts that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.scaled(x)
        for scale in (self.scale, self.listed[0]):
            self.write(scale, y.detach().mean(0).abs())
        return y * self.scale * (1 + self.listed[0])

    def write(self, scale: torch.Tensor, mean: torch.Tensor) -> None:
        with torch.no_grad():
            scale.set_(scale * 0.9 + 0.5 * mean)  # type: ignore[call-overload]


class PlainPack(Plain):
    """It is written to through another view of its memory, of which torch knows nothing."""

    def write(self, scale: torch.Tensor, mean: torch.Tensor) -> None:
        torch.from_dlpack(scale.detach()).mul_(0.9).add_(mean, alpha=0.5)


PLAIN = [Plain, PlainOut, PlainExchanged, PlainSet, PlainPack]


@pytest.mark.covering(2)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("keeper", [Scaled, Exchanged, UsedPast, Evaluated, EvaluatedLater, Divided, *PLAIN])
def test_a_backward_finds_what_its_own_microbatch_wrote(
    job: Job, keeper: Any, schedule: str, mode: str, size: str
) -> None:
    torch.manual_seed(0)
    model = Chain(SIZES[size][1], keeper)
    found = check(job, model, {"keeper": 1}, {**MODES[mode], "pipeline": schedule}, size, joined=True)
    assert all(one["modules"]["keeper"] != one["modules"]["first"] for one in found)


@pytest.mark.covering(2)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("keeper", PLAIN)
def test_a_plain_tensor_beside_the_step_function(job: Job, keeper: Any, mode: str, size: str) -> None:
    torch.manual_seed(0)
    found = check(job, Chain(SIZES[size][1], keeper), {"first": 1}, MODES[mode], size, joined=True)
    assert all(one["modules"]["keeper"] != one["modules"]["first"] for one in found)


class Around(nn.Module):
    """Changes a buffer past its version while another rank computes, and puts it back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.child, self.last = (nn.Linear(width, width) for _ in range(3))
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        before = self.scale.clone()
        self.scale.data.add_(x.detach()[0])
        x = self.child(x) * self.scale.clone()
        self.scale.data.copy_(before)
        return self.last(x)


@pytest.mark.covering(2)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_put_back_past_its_version(job: Job, schedule: str, mode: str, size: str) -> None:
    torch.manual_seed(0)
    check(job, Around(SIZES[size][1]), {"child": 1}, {**MODES[mode], "pipeline": schedule}, size)


class Counted(Keeper):
    """Counts past its version, which no backward needs."""

    def keep(self, width: int) -> None:
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.data.add_(1)
        return self.scaled(x) + self.calls


@pytest.mark.parametrize("keeper", [Normalised, Counted])
def test_what_no_backward_needs_leaves_microbatches_parallel(job: Job, keeper: Any) -> None:
    torch.manual_seed(0)
    found = check(job, Chain(3, keeper), {"keeper": 1}, {})
    assert not any(one["one_at_a_time"] for one in found)
    assert not any(runtime[StateOrder].one_at_a_time for runtime in job.runtimes)
