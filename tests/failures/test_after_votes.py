"""A rank whose own server fails after its vote takes back a step that others may keep: no further one runs."""

from __future__ import annotations

from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.job.runtime import Runtime
from shardwright.model import vote
from torch import nn

from tests.frames.job import Job, job_fixture

job = job_fixture(2)


def test_no_step_runs_after_one_that_may_have_succeeded_on_some_ranks_only(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = vote.exchange_in_step

    def failing(runtime: Runtime, *args: Any) -> dict[int, Any]:
        votes = usual(runtime, *args)
        if runtime.place.rank == 1 and runtime.step.number == 2:
            raise smp.RemoteError(1, "here", None, None, None, "ServerError", "a thread has panicked")
        return votes

    monkeypatch.setattr(vote, "exchange_in_step", failing)
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]

    def main(runtime: Runtime) -> list[str]:
        module = models[runtime.place.rank]
        smp.set_partition(module[1], 1)
        model = smp.DistributedModel(module)

        @smp.step
        def train(x: torch.Tensor) -> None:
            model.backward(model(x).sum())

        ends = []
        for _ in range(5):
            try:
                train(torch.ones(2, 4))
                ends.append("")
            except smp.ShardwrightError as error:
                ends.append(error.kind if isinstance(error, smp.RemoteError) else type(error).__name__)
                if ends[-1] == "PartialUpdateError":
                    smp.resume_after_failure(error)
        return ends

    given = {"auto_partition": False, "default_partition": 0, "microbatches": 2}
    first, second = job.run(main, given)
    assert second == ["", "ServerError", "PartialUpdateError", "", ""]
    # Rank 0 had both votes, or heard of the failure before; and then hears of that, or of the refusal.
    assert (first[0], *first[3:]) == ("", "", ""), first
    assert first[1] in ("", "ServerError")
    assert first[2] in ("ServerError", "PartialUpdateError")
