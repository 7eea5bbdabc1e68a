"""The library: the stages are an ``nn.Sequential``, placed by hand."""

from __future__ import annotations

import os
from typing import Any

import shardwright as smp
import torch
from torch import nn

from benches.pipeline import stages
from benches.pipeline.cases import LOOPS, POLICY, CostKind, Schedule, active_microbatches, costs_of, placement
from benches.pipeline.ideal import policy_makespan


class Shardwright:
    """A rank; see :class:`benches.pipeline.rank.Side`."""

    refusal = smp.ConfigError

    def __init__(self) -> None:
        """Nothing is started before a schedule is known."""
        self.rank, self.num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._model: Any = None
        self._step: Any = None
        self._name: Schedule = "simple"

    def configure(self, schedule: Schedule) -> None:
        self._name = schedule
        smp.shutdown()
        smp.init(
            pipeline_parallel_degree=self.num_ranks,
            microbatches=stages.MICROBATCHES,
            pipeline=POLICY[schedule],
            active_microbatches=active_microbatches(schedule, self.num_ranks),
            auto_partition=False,
            default_partition=0,
            static_mode=True,
            fast_mode=True,
            static_steps=2,
        )
        ranks = placement(self.num_ranks, LOOPS[schedule])
        parts: list[nn.Module] = [stages.Stage(index) for index in range(len(ranks))]
        # As with torch, the last stage's rank has the loss, so that nothing comes back to the first before backward.
        parts.append(stages.Loss())
        for part, rank in zip(parts, [*ranks, ranks[-1]], strict=True):
            smp.set_partition(part, rank)
        self._model = smp.DistributedModel(nn.Sequential(*parts))

        @smp.step
        def step(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
            loss = model(inputs)
            model.backward(loss)
            return loss

        self._step = step

    def prepare(self, kind: CostKind, unit_ms: float) -> None:
        stages.Stage.costs = costs_of(self.num_ranks, LOOPS[self._name], kind, unit_ms)

    def step(self) -> None:
        self._step(self._model, stages.batch())

    def zero_grad(self) -> None:
        self._model.zero_grad()

    def barrier(self) -> None:
        smp.barrier()

    def ideal(self, schedule: Schedule, kind: CostKind, unit_ms: float) -> float:
        loops = LOOPS[schedule]
        return policy_makespan(
            placement(self.num_ranks, loops),
            costs_of(self.num_ranks, loops, kind, unit_ms),
            stages.MICROBATCHES,
            POLICY[schedule],
            active_microbatches(schedule, self.num_ranks),
        )

    def close(self) -> None:
        smp.shutdown()
