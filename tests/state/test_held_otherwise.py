"""What a module holds, but not in an attribute: buffers that a forward registers, modules that are no children."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.frames.job import Job, job_fixture
from tests.state.keepers import Counter
from tests.state.running import MICROBATCHES, MODES, SCHEDULES, SIZES, check

job = job_fixture(2)


def _registered(module: Holds, x: torch.Tensor) -> torch.Tensor:
    module.register_buffer("current", x.detach().cumsum(0), persistent=False)
    return module.child(x) + module.current


def _deleted(module: Holds, x: torch.Tensor) -> torch.Tensor:
    module.register_buffer("current", x.detach().cumsum(0))
    x = module.child(x) + module.current
    del module.current
    return x


def _declared(module: Holds, x: torch.Tensor) -> torch.Tensor:
    module.declared = x.detach().cumsum(0)
    return module.child(x) + module.declared


def _in_a_slot(module: Holds, x: torch.Tensor) -> torch.Tensor:
    module.slot = x.detach().cumsum(0)
    return module.child(x) + module.slot


def _deleted_from_a_slot(module: Holds, x: torch.Tensor) -> torch.Tensor:
    x = _in_a_slot(module, x)
    del module.slot
    return x


def _counted_in_a_slot(module: Holds, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(module, "calls"):
        module.calls, module.listed = 0, []
    module.calls = module.calls + 1
    module.listed.append(float(x.detach().sum()))
    return module.child(x) + module.calls + module.listed[-1] + len(module.listed)


REGISTERED = {"registered": _registered, "deleted": _deleted, "declared": _declared}
IN_SLOTS = {"set": _in_a_slot, "deleted": _deleted_from_a_slot, "counted": _counted_in_a_slot}


class Holds(nn.Module):
    """From some microbatch on it holds something while it calls `child`, which runs on another rank."""

    __slots__ = ("calls", "listed", "slot")

    declared: Any
    calls: int
    listed: list[float]
    slot: torch.Tensor

    def __init__(self, width: int, act: Callable[..., torch.Tensor], first: int) -> None:
        super().__init__()
        self.act, self.first = act, first
        self.register_buffer("declared", None)
        self.counter = Counter()
        self.before, self.child, self.after = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x).tanh()
        x = self.act(self, x) if self.counter() > self.first else self.child(x)
        return self.after(x.tanh())


@pytest.mark.covering(2)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("first", [0, MICROBATCHES, 2 * MICROBATCHES])
@pytest.mark.parametrize("kind", REGISTERED)
def test_what_a_forward_registers_is_of_its_own_microbatch(
    job: Job, kind: str, first: int, schedule: str, mode: str, size: str
) -> None:
    torch.manual_seed(0)
    model = Holds(SIZES[size][1], REGISTERED[kind], first)
    check(job, model, {"child": 1}, {**MODES[mode], "pipeline": schedule}, size)


@pytest.mark.covering(2)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("first", [0, MICROBATCHES, MICROBATCHES + 2])
@pytest.mark.parametrize("kind", IN_SLOTS)
def test_what_is_in_slots_is_of_its_own_microbatch(
    job: Job, kind: str, first: int, schedule: str, mode: str, size: str
) -> None:
    torch.manual_seed(0)
    model = Holds(SIZES[size][1], IN_SLOTS[kind], first)
    check(job, model, {"child": 1}, {**MODES[mode], "pipeline": schedule}, size)


class Refers(nn.Module):
    """Calls a module that it holds as none of its children, and first counts in the second step."""

    def __init__(self, width: int, how: str) -> None:
        super().__init__()
        self.count = 0
        self.counter = Counter()
        self.child, self.own = nn.Linear(width, width), nn.Linear(width, width)
        if how == "object":
            object.__setattr__(self, "tied", self.own)
        else:
            self.__dict__["tied"] = self.own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counter() > MICROBATCHES:
            self.count = self.count + 1
        x = self.tied(self.child(x.tanh()))  # type: ignore[operator]
        return self.own(x.tanh()) * (1 + self.count)


@pytest.mark.parametrize("how", ["object", "dict"])
@pytest.mark.parametrize("size", SIZES)
def test_a_module_that_is_no_child_is_there_when_a_step_runs_again(job: Job, size: str, how: str) -> None:
    torch.manual_seed(0)
    model = Refers(SIZES[size][1], how)
    stats = check(job, model, {"child": 1}, {}, size)
    assert all(each["steps"] > 4 for each in stats)  # one was run again
