"""Attributes that a forward sets before it reads them, in some microbatches only."""

from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.job.runtime import Runtime
from torch import nn

from tests.frames.job import Job, job_fixture
from tests.state.running import MODES, SCHEDULES, SIZES, check

job = job_fixture(2)


class Initialised(nn.Module):
    """Takes what it subtracts from the first microbatch it sees."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.is_ready = False
        self.mean: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_ready:
            self.mean = x.detach().mean(0)
            self.is_ready = True
        assert self.mean is not None
        return self.layer(x) - self.mean


class Best(nn.Module):
    """Scales by the largest sum so far."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.best, self.factor = -1e9, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (total := float(x.detach().sum())) > self.best:
            self.best, self.factor = total, 0.5 + 0.1 * (total > 0)
        return self.layer(x) * (1 + self.factor)


class Hidden(nn.Module):
    """A recurrent state that starts anew where training begins or ends."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(width, width)
        self.hidden: torch.Tensor | None = None
        self.was_training = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.hidden is None or self.was_training != self.training:
            self.hidden = torch.zeros_like(x)
            self.was_training = self.training
        hidden = self.cell(x, self.hidden.detach().clone())
        self.hidden = hidden.detach()
        return hidden


class BySign(nn.Module):
    """Keeps nothing else; the data decide whether it takes a new factor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.calls = 0
        self.factor: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.detach().sum()
        if total > 0 or not hasattr(self, "other"):
            self.factor = total.sigmoid()
            self.other = 1.0
        assert self.factor is not None, "the first microbatch sets it"
        return self.layer(x) * self.factor


class DataAlone(nn.Module):
    """Sets what it uses in a branch on the data alone, and starts with a value."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.factor: torch.Tensor | float = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.detach().sum()
        if total.abs() % 1 > 0.3:
            self.factor = 1 + total.sigmoid()
        return self.layer(x) * self.factor


class Around(nn.Module):
    """Other modules before and after it."""

    def __init__(self, width: int, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(width, width), inner, nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.inner(self.before(x).tanh()).tanh())


class KeepsItsActivation(nn.Module):
    """Counts its calls, and keeps a tensor with a graph for its own use."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.activation = self.layer(x).tanh()
        return self.activation * self.calls


PLACES = {
    "with the root": {"before": 1},
    "elsewhere": {"inner": 1},
    "both elsewhere": {"before": 1, "inner": 1},
    "nested": {"inner": 1, "inner.inner": 0},
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", [Initialised, Best, Hidden, BySign, DataAlone])
def test_microbatches_find_what_earlier_ones_have_set(
    job: Job, kind: type[nn.Module], schedule: str, place: str, mode: str, size: str
) -> None:
    torch.manual_seed(0)
    width = SIZES[size][1]
    inner = kind(width)  # type: ignore[call-arg]
    model = Around(width, Around(width, inner) if place == "nested" else inner)
    check(job, model, PLACES[place], {**MODES[mode], "pipeline": schedule}, size)


@pytest.mark.parametrize("place", PLACES)
def test_what_is_set_anew_each_time_lets_microbatches_overlap(
    job: Job, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    width = SIZES["small"][1]
    inner = KeepsItsActivation(width)
    check(job, Around(width, Around(width, inner) if place == "nested" else inner), PLACES[place], {}, "small")
    assert "is run again" not in caplog.text


class Passing(nn.Module):
    """Sets an attribute anew in each forward, and keeps nothing else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scaled = x * 2
        return self.scaled


def test_a_step_that_fails_before_its_microbatches_leaves_what_the_script_has_set(job: Job) -> None:
    width = SIZES["small"][1]

    def main(_: Runtime) -> Any:
        module = Around(width, Passing()).double()
        smp.set_partition(module.before, 1)
        model = smp.DistributedModel(module)

        @smp.step
        def train(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).sum()
            model.backward(loss)
            return loss

        train(torch.randn(4, width, dtype=torch.float64))
        module.inner.scaled = "of the script"
        with pytest.raises((smp.ConfigError, ValueError, smp.RemoteError)):
            train(torch.randn(3, width, dtype=torch.float64))
        return module.inner.scaled

    found, other = job.run(main, {"auto_partition": False, "default_partition": 0, "microbatches": 2})
    assert found == "of the script", found
    assert not isinstance(other, BaseException), other
