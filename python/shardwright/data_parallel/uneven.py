"""Uneven inputs: ranks without batches left take part in the others' collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from shardwright.data_parallel.collectives import ReplicaCollectives
from shardwright.data_parallel.participants import participants
from shardwright.errors import ShardwrightError

if TYPE_CHECKING:
    from shardwright.data_parallel.participants import ModelPart
    from shardwright.job.runtime import Runtime

#: What a rank says of itself before a step.
LEFT, EVALUATES, TRAINS = 0, 1, 2


class Attendance:
    """Who of the data-parallel group still has batches, agreed on before every step inside ``model.join()``."""

    def __init__(self, runtime: Runtime, throw_on_early_termination: bool) -> None:
        """For the calling rank's data-parallel group."""
        collectives = runtime[ReplicaCollectives].dp
        assert collectives is not None, "there is a data-parallel group to agree in"
        self._runtime = runtime
        self._collectives = collectives
        self._throw = throw_on_early_termination
        #: The global ranks that take part in the step.
        self.present: list[int] = list(runtime.place.dp_ranks)

    def begin_step(self, parts: Sequence[ModelPart], num_models: int) -> None:
        """Begin a step in which this rank runs nothing of its own."""
        for collectives in self._runtime[ReplicaCollectives].all:
            collectives.begin_step()
        participants(self._runtime, parts, num_models)

    def announce(self, says: int) -> int:
        """Exchange what the ranks do next; returns what those who are left do.

        Raises:
            ShardwrightError: A rank has no batches left, and that was to be an error.
        """
        ranks = self._runtime.place.dp_ranks
        notes = torch.zeros(len(ranks), dtype=torch.uint8, device=self._runtime.place.device)
        notes[ranks.index(self._runtime.place.rank)] = says
        self._collectives.maximum(notes)
        said = notes.tolist()
        self.present = [rank for rank, note in zip(ranks, said, strict=True) if note != LEFT]
        if self._throw and len(self.present) < len(ranks):
            gone = sorted(set(ranks) - set(self.present))
            raise ShardwrightError(
                f"data-parallel ranks {gone} have no batches left before step {self._runtime.step.number}, and join() "
                "was asked to raise then (throw_on_early_termination=True)"
            )
        return int(max(said))

    def attend(self) -> None:
        """Say that this rank runs the step that begins."""
        self.announce(TRAINS if torch.is_grad_enabled() else EVALUATES)
