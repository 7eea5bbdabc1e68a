"""``torch.distributed.pipelining`` over Gloo, its transport on a CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from shardwright import _core
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from benches.pipeline import stages
from benches.pipeline.cases import LOOPS, CostKind, Schedule, costs_of
from benches.pipeline.ideal import StageCosts, program_makespan

_CLASSES = {
    "simple": ScheduleGPipe,
    "interleaved": Schedule1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "looped": ScheduleInterleaved1F1B,
}
_COMPUTES = frozenset("FBIW")


def _target_ignored(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return stages.loss_of(output)


class TorchPipelining:
    """A rank; see :class:`benches.pipeline.rank.Side`."""

    refusal = NotImplementedError

    def __init__(self) -> None:
        """Join the group."""
        dist.init_process_group("gloo")
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self._parts: list[torch.nn.Module] = []
        self._schedule: Any = None
        self._loops = 1

    def configure(self, schedule: Schedule) -> None:
        self._loops = LOOPS[schedule]
        count = self.num_ranks * self._loops
        mine = range(self.rank, count, self.num_ranks)
        self._parts = [stages.Stage(index) for index in mine]
        made = [
            PipelineStage(part, index, count, torch.device("cpu"))
            for index, part in zip(mine, self._parts, strict=True)
        ]
        single = schedule in ("simple", "interleaved")
        kind: Any = _CLASSES[schedule]
        self._schedule = kind(made[0] if single else made, n_microbatches=stages.MICROBATCHES, loss_fn=_target_ignored)

    def prepare(self, kind: CostKind, unit_ms: float) -> None:
        stages.Stage.costs = costs_of(self.num_ranks, self._loops, kind, unit_ms)

    def step(self) -> None:
        if self.rank == self.num_ranks - 1:
            inputs = (stages.batch(),) if self.rank == 0 else ()
            self._schedule.step(*inputs, target=stages.batch(), losses=[])
        elif self.rank == 0:
            self._schedule.step(stages.batch())
        else:
            self._schedule.step()

    def zero_grad(self) -> None:
        for part in self._parts:
            part.zero_grad()

    def barrier(self) -> None:
        dist.barrier()

    def ideal(self, schedule: Schedule, kind: CostKind, unit_ms: float) -> float:
        costs = costs_of(self.num_ranks, self._loops, kind, unit_ms)
        if schedule in ("simple", "interleaved"):  # torch gives out no order, or not the one that it runs
            program = _core.reference_program(schedule, ranks=self.num_ranks, microbatches=stages.MICROBATCHES)
            return program_makespan(program, costs)
        order = self._schedule.pipeline_order
        program = "\n".join(
            ",".join(
                f"{action.stage_index}{action.computation_type.value}{action.microbatch_index}"
                for action in order[rank]
                if action is not None and action.computation_type.value in _COMPUTES
            )
            for rank in range(self.num_ranks)
        )
        if schedule == "zero_bubble":
            # Nothing waits for the first stage's input gradient: torch computes it with the weight's.
            first = costs[0]
            costs[0] = StageCosts(first.forward, 0.0, first.input_gradient + first.weight_gradient)
        return program_makespan(program, costs)

    def close(self) -> None:
        dist.destroy_process_group()
