"""Modules that keep something find the microbatches in the order of plain PyTorch, wherever they run."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.frames.job import Job, in_process_ranks
from tests.state.keepers import KEEPERS
from tests.state.running import MODES, SIZES, check

#: The module on its caller's rank, fed by another rank's result, and on another rank.
PLACES = {"here": {"first": 1, "keeper": 0, "last": 1}, "away": {"first": 0, "keeper": 1, "last": 0}}


class Chain(nn.Module):
    """A module that keeps something, between two layers."""

    def __init__(self, width: int, keeper: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.keeper = keeper(width)
        self.last = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.keeper(self.first(x)))


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    with in_process_ranks():
        made = Job(2)
        yield made
        made.close()


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("keeper", KEEPERS)
def test_a_module_that_keeps_something_is_exact(
    job: Job, keeper: Callable[[int], nn.Module], mode: str, size: str, places: str
) -> None:
    torch.manual_seed(5)
    settings: dict[str, Any] = {"active_microbatches": 4, **MODES[mode]}
    check(job, Chain(SIZES[size][1], keeper), PLACES[places], settings, size)
