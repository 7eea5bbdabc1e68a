"""A model that the script has dropped, and that only some ranks still have, changes nothing for the next one."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.job.runtime import Runtime
from torch import nn

from tests.frames.job import Job, job_fixture
from tests.state.keepers import BufferCounter, kept
from tests.state.running import MICROBATCHES, SCHEDULES, alone, losses
from tests.state.test_past_versions import Chain, Scaled

WIDTH, ROWS = 3, 2
job = job_fixture(2)


def wrapped(net: nn.Module) -> smp.DistributedModel:
    smp.set_partition(net.get_submodule("keeper"), 1)
    return smp.DistributedModel(net)


@smp.step
def stepped(model: smp.DistributedModel, batch: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = model(batch)
    model.backward(losses(output))
    return output


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("keeps", [0, 1])
def test_microbatches_follow_the_root_whatever_ranks_still_have(job: Job, keeps: int, schedule: str) -> None:
    torch.manual_seed(0)
    batch = torch.randn(ROWS * MICROBATCHES, WIDTH, dtype=torch.float64)
    original = Chain(WIDTH, BufferCounter).double()
    state = original.state_dict()
    (expected,) = alone(original, [batch])

    def main(runtime: Runtime) -> dict[str, Any]:
        first = wrapped(Chain(WIDTH, Scaled).double())  # its microbatches run one after another
        stepped(first, batch)
        held = [first] if runtime.place.rank == keeps else []
        del first
        gc.collect()
        net = Chain(WIDTH, BufferCounter).double()
        net.load_state_dict(state)
        model = wrapped(net)
        outputs = stepped(model, batch).concat()
        found = {"outputs": outputs} if runtime.place.rank == 0 else {}
        found |= {f"{name}.grad": one.grad for name, one in model.local_named_parameters() if one.grad is not None}
        held.clear()
        return {**found, **kept(net)}

    settings = {"microbatches": MICROBATCHES, "pipeline": schedule, "active_microbatches": MICROBATCHES}
    found = job.run(main, {"auto_partition": False, "default_partition": 0, **settings})
    for rank in found:
        assert not isinstance(rank, BaseException), rank
        for name, value in rank.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-14, msg=name)
