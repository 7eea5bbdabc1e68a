"""Training steps while messages go wrong on their way: put right where that can be, an error in time where not."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.errors import PeerLostError, RemoteError
from shardwright.job.runtime import Runtime
from shardwright.model.sentinel import is_sentinel
from torch import nn

from tests.frames.job import Job, connected, in_process_ranks

RANKS = 3
WIDTH = 6
MICROBATCHES = 4
HARMLESS = "seed={} delay=0.3 reorder=0.3 duplicate=0.3"


class Model(nn.Module):
    """Stages on all ranks, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(RANKS))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for stage in [*self.stages, self.stages[1]]:
            batch = stage(batch)
        return self.head(batch).square().mean()


def train(job: Job, steps: int) -> list[Any]:
    """Train on every rank; each rank's gradients by name, or its error."""
    torch.manual_seed(0)
    original = Model().double()
    batches = [torch.randn(2 * MICROBATCHES, WIDTH, dtype=torch.float64) for _ in range(steps)]

    def main(runtime: Runtime) -> dict[str, torch.Tensor]:
        module = copy.deepcopy(original)
        for rank, stage in enumerate(module.stages):
            smp.set_partition(stage, rank)
        model = smp.DistributedModel(module)

        @smp.step
        def step(batch: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = model(batch)
            model.backward(loss)
            return loss

        for number, batch in enumerate(batches):
            # The ranks share the process's generator, whose seed orders the sums.
            torch.manual_seed(number)
            step(batch)
        return {
            name: parameter.grad
            for name, parameter in module.named_parameters()
            if not is_sentinel(parameter) and parameter.grad is not None
        }

    settings = {
        "microbatches": MICROBATCHES,
        "pipeline": "interleaved",
        "deterministic_server": True,
        "auto_partition": False,
        "default_partition": 0,
    }
    return job.run(main, settings)


@contextmanager
def job_with(faults: str | None) -> Iterator[Job]:
    with in_process_ranks():
        job = Job(RANKS, faults)
        try:
            yield job
        finally:
            job.close()
            gc.collect()


def gradients(faults: str | None) -> dict[str, torch.Tensor]:
    together: dict[str, torch.Tensor] = {}
    with job_with(faults) as job:
        for found in train(job, steps=2):
            if isinstance(found, BaseException):
                raise found
            assert not together.keys() & found.keys()
            together |= found
    return together


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return gradients(None)


@pytest.mark.parametrize("seed", range(3))
def test_harmless_faults_change_no_bit_of_any_gradient(seed: int, expected: dict[str, torch.Tensor]) -> None:
    assert len(expected) == len(list(Model().parameters()))
    found = gradients(HARMLESS.format(seed))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize("after", [0, 12])
@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        ("drop=1", "did not arrive within 3 s"),
        ("corrupt=1", "it was damaged on its way"),
        ("cut=noticed", "died: its connection ended without a shutdown notice"),
        ("cut=silent", "has been silent for 3 s"),
    ],
)
def test_harmful_faults_end_the_step_on_every_rank_with_the_peer_named(harm: str, reason: str, after: int) -> None:
    with job_with(f"{HARMLESS.format(1)} {harm} after={after} from=1 deadline=3") as job:
        found = train(job, steps=50)
        for error in found:
            assert isinstance(error, PeerLostError | RemoteError), error
        # Rank 1 is the one whose messages do not come through; it learns that the others have given it up. Where its
        # line to rank 2 still holds, it tells rank 2 so first now and then: then that names the other end.
        assert found[0].rank == 1
        assert found[2].rank in (0, 1)
        assert any(reason in str(error) for error in found), found
        assert found[1].rank in (0, 2)


def test_faults_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="is not a fault; there are seed, "):
        connected(2, "loss=1")
    with pytest.raises(ValueError, match="it has to be a share from 0 to 1"):
        connected(2, "drop=2")
