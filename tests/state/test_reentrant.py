"""Reentrant checkpoints around code that changes what a module keeps."""

import pytest
import torch
from shardwright.errors import FrameError, RemoteError
from torch.utils.checkpoint import checkpoint

from tests.frames.job import Job, job_fixture
from tests.state.keepers import Keeper
from tests.state.running import SIZES, check
from tests.state.test_order import Chain

job = job_fixture(3)
PLACES = [{"first": 1, "keeper": 0, "last": 1}, {"first": 0, "keeper": 1, "last": 2}]


class Counted(Keeper):
    """Counts how often it is computed."""

    def keep(self, width: int) -> None:
        self.count = 0
        self.lengths = [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.compute, x, use_reentrant=True)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        y = self.scaled(x) * 2
        self.count += 1  # after all that backward needs
        self.lengths[0] += len(x)
        return y


class Scales(Counted):
    """Computes with the count."""

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.scaled(x) * (1 + 0.1 * self.count)


@pytest.mark.parametrize("places", PLACES)
def test_a_count_of_computations_is_that_of_torch(job: Job, places: dict[str, int]) -> None:
    torch.manual_seed(5)
    check(job, Chain(SIZES["small"][1], Counted), places, {})


@pytest.mark.parametrize("places", PLACES)
def test_code_that_computes_with_the_count_is_refused(job: Job, places: dict[str, int]) -> None:
    torch.manual_seed(5)
    with pytest.raises(
        (FrameError, RemoteError), match=r"Scales\.compute changed what a module keeps inside .*use_reentr"
    ):
        check(job, Chain(SIZES["small"][1], Scales), places, {})
