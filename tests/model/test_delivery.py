"""A model whose first step fails before all ranks have its division is divided on all of them by the next step."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.errors import RemoteError
from shardwright.job.runtime import Runtime
from torch import nn

from tests.frames.job import Job, in_process_ranks
from tests.jobs.patience import HANG_SECONDS

SECONDS = HANG_SECONDS


class Fails(nn.Linear):
    """Fails in its first forward after the trace."""

    when: Any = staticmethod(lambda: False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.when():
            raise OSError("the first step fails")
        return super().forward(x)


@pytest.mark.parametrize("width", [4, 160])
def test_a_rank_that_was_late_for_a_failed_first_step_gets_its_part_in_the_next(width: int) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(Fails(width, width), nn.Linear(width, width), nn.Linear(width, width)).double()
    batch = torch.randn(8, width, dtype=torch.float64)
    failed = threading.Event()

    def main(runtime: Runtime) -> dict[str, torch.Tensor]:
        module = copy.deepcopy(whole)
        for rank in (1, 2):
            smp.set_partition(module[rank], rank)
        model = smp.DistributedModel(module)
        module[0].when = lambda: not failed.is_set() and model.partitioned

        @smp.step
        def train(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            model.backward(loss)
            return loss.detach()

        if runtime.place.rank == 2:  # enters the step when it has failed elsewhere
            job.turns[2].give()
            assert failed.wait(SECONDS)
            job.turns[2].take()
        with pytest.raises((OSError, RemoteError), match="the first step fails"):
            train(batch)
        failed.set()
        train(batch)
        return {name: parameter.grad for name, parameter in model.local_named_parameters()}

    with in_process_ranks():
        job = Job(3)
        try:
            results = job.run(main, {"microbatches": 2})
        finally:
            job.close()
    for part in batch.chunk(2):
        whole(part).square().mean().backward()
    expected = {name: parameter.grad / 2 for name, parameter in whole.named_parameters()}
    assert [sorted(found) for found in results] == [[f"{rank}.bias", f"{rank}.weight"] for rank in range(3)]
    for found in results:
        assert isinstance(found, dict)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-12)
