"""Names outside itself that a step function assigns."""

import logging

import pytest
import shardwright as smp
import torch
from shardwright.job.runtime import Runtime
from shardwright.step.assigned import assigned_outside
from torch import nn

from tests.frames.job import Job, job_fixture

COUNT = 0

job = job_fixture(2)


def test_only_names_that_are_assigned_count() -> None:
    total = 0

    def assigns() -> int:
        global COUNT
        nonlocal total
        own = COUNT
        COUNT += 1
        total += own
        inner = lambda: own  # noqa: E731
        return inner()

    def reads() -> int:
        return COUNT + total

    assert assigned_outside(assigns) == ["COUNT", "total"]
    assert assigned_outside(reads) == []
    assert assigned_outside(len) == []


def test_a_step_function_that_assigns_a_global_name_is_told_once(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    def main(runtime: Runtime) -> None:
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        smp.set_partition(module[1], 1)
        model = smp.DistributedModel(module)

        @smp.step
        def counts(inputs: torch.Tensor) -> torch.Tensor:
            global COUNT
            COUNT += 1
            loss = model(inputs).square().mean()
            model.backward(loss)
            return loss

        for _ in range(2):
            counts(torch.randn(4, 4))

    with caplog.at_level(logging.WARNING, "shardwright"):
        results = job.run(main, {"auto_partition": False, "default_partition": 0, "microbatches": 2})
    assert results == [None, None]
    told = [record.getMessage() for record in caplog.records if "counts assigns" in record.getMessage()]
    assert len(told) == 1
    assert "counts assigns COUNT, which it shares with its other microbatches" in told[0]
