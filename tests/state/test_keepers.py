"""Modules that keep something find the microbatches in the order of plain PyTorch, wherever they run."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from shardwright.execution.state_order import StateOrder
from torch import nn

from tests.frames.job import Job, job_fixture
from tests.state.keepers import KEEPERS, BufferCounter
from tests.state.running import MODES, SIZES, STEPS, check

#: The modules on their caller's rank, fed by another rank's result, and on another rank.
PLACES = {"here": {"first": 1, "keepers": 0, "last": 1}, "away": {"first": 0, "keepers": 1, "last": 0}}
OTHERS = [keeper for keeper in KEEPERS if keeper is not BufferCounter]
GROUPS = {"first half": OTHERS[::2], "second half": OTHERS[1::2]}


class Chain(nn.Module):
    """Modules that keep something, called one by one between two layers."""

    def __init__(self, width: int, keepers: Sequence[Callable[[int], nn.Module]]) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.keepers = nn.ModuleList([keeper(width) for keeper in keepers])
        self.last = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for keeper in self.keepers:
            x = keeper(x)
        return self.last(x)


job = job_fixture(2)


@pytest.mark.covering(2)
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("group", GROUPS)
def test_modules_that_keep_something_are_exact_at_once(job: Job, group: str, mode: str, size: str, places: str) -> None:
    torch.manual_seed(5)
    settings: dict[str, Any] = {"active_microbatches": 4, **MODES[mode]}
    before = job.runtimes[0].step.number
    check(job, Chain(SIZES[size][1], GROUPS[group]), PLACES[places], settings, size)
    assert job.runtimes[0].step.number - before == STEPS, "no step was run again"


@pytest.mark.covering(1)
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("mode", MODES)
def test_what_a_backward_has_saved_and_a_later_microbatch_writes(job: Job, mode: str, places: str) -> None:
    torch.manual_seed(5)
    check(job, Chain(SIZES["large"][1], [BufferCounter]), PLACES[places], MODES[mode], "large")
    assert all(runtime[StateOrder].one_at_a_time for runtime in job.runtimes)


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("keeper", OTHERS)
def test_each_alone_is_exact(job: Job, keeper: Callable[[int], nn.Module], places: str) -> None:
    torch.manual_seed(5)
    check(job, Chain(SIZES["large"][1], [keeper]), PLACES[places], MODES["fast"], "large")
