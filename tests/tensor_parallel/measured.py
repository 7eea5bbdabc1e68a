"""A rank of a job, 2 pipeline x 2 tensor-parallel ranks, whose two pipelines would choose different schedules.

``measured.py PIPELINE``: ``zero_bubble`` or ``auto``, which choose from what the first steps take. Here these times are
made up.
"""

from __future__ import annotations

import sys

import shardwright as smp
import torch
from shardwright.job.runtime import Runtime, current_runtime
from shardwright.nn.linear import DistributedLinear
from shardwright.scheduling import RankMemory, Scheduling, StepTimes
from torch import nn

from tests.tensor_parallel.job import check_step, start
from tests.tensor_parallel.unequal import WIDTH, make

MICROBATCHES = 4
STEPS = 8
#: By the schedule that is asked for and by tp_rank: nanoseconds of forwards, backwards and weight gradients.
MEASURED = {
    "zero_bubble": ((40_000_000, 40_000_000, 40_000_000), (40_000_000, 80_000_000, 0)),
    "auto": ((40_000_000, 40_000_000, 40_000_000), (4_000, 8_000, 1_000)),
}


class MadeUp(Scheduling):
    """Measures what :data:`MEASURED` says."""

    def end_step(self, runtime: Runtime) -> None:
        before = len(self._own)
        super().end_step(runtime)
        if len(self._own) > before:
            self._own[-1] = made_up(self._own[-1], smp.tp_rank())


def made_up(times: StepTimes, tp_rank: int) -> StepTimes:
    forward, backward, weight = MEASURED[sys.argv[1]][tp_rank]
    return times._replace(forward_ns=forward, backward_ns=backward, weight_ns=weight, seconds=0.3)


def choices(scheduling: Scheduling) -> list[tuple[str, list[int] | None]]:
    """What the pipeline of each tp_rank would choose from its own measurements."""
    found = []
    for tp_rank in range(2):
        own = [made_up(StepTimes(step, 0, 0, 0.0, MICROBATCHES), tp_rank) for step in range(2, 6)]
        _, decision = scheduling._decide(6, [(own, RankMemory(0, None))] * 2)
        assert decision is not None
        found.append((decision.schedule, decision.splits))
    return found


def main() -> None:
    pipeline = sys.argv[1]
    chosen = {"active_microbatches": MICROBATCHES} if pipeline == "auto" else {}  # zero_bubble chooses it
    start(microbatches=MICROBATCHES, pipeline=pipeline, **chosen)
    scheduling = current_runtime()[Scheduling]
    first, second = choices(scheduling)
    assert first != second, first
    scheduling.__class__ = MadeUp
    net, whole = make(DistributedLinear), make(nn.Linear)
    smp.set_partition(net[1], 1)
    model = smp.DistributedModel(net)

    @smp.step
    def run(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        batches = [torch.randn(8, WIDTH, generator=generator) for _ in range(2)]
        check_step(model, whole, run, batches, f"step {step}")
    decision = scheduling.decision
    assert decision is not None
    assert (decision.schedule, decision.splits) == first
    print("exact under the first pipeline's choice")
    smp.shutdown()


if __name__ == "__main__":
    main()
