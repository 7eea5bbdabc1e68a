"""Ranks that are threads of one process are to each other what processes are."""

from __future__ import annotations

import pytest
import shardwright as smp
import torch
from shardwright.job.runtime import Runtime
from torch import nn

from tests.frames.job import Job, job_fixture

job = job_fixture(2)


@pytest.mark.parametrize("changing", [0, 1])
def test_no_rank_computes_under_the_settings_of_another_and_none_are_left(job: Job, changing: int) -> None:
    before = torch.get_default_dtype()
    seen: list[list[torch.dtype]] = [[], []]

    def main(runtime: Runtime) -> None:
        model = smp.DistributedModel(nn.Linear(3, 3).double())

        @smp.step
        def train(part: torch.Tensor) -> None:
            model.backward(model(part).sum())

        for _ in range(3):
            seen[runtime.place.rank].append(torch.get_default_dtype())
            if runtime.place.rank == changing:
                torch.set_default_dtype(torch.float64)
            train(torch.ones(2, 3, dtype=torch.float64))

    assert job.run(main, {}) == [None, None]
    assert torch.get_default_dtype() == before
    assert seen[changing] == [before, torch.float64, torch.float64]
    assert seen[1 - changing] == [before] * 3
