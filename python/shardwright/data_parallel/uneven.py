"""Uneven inputs: ranks that have run out of batches still take part in collectives."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwright.data_parallel.collectives import ReplicaCollectives
from shardwright.data_parallel.participants import ModelPart, participants
from shardwright.errors import ShardwrightError
from shardwright.job.runtime import Runtime

#: The status of a rank before a step.
EXHAUSTED, EVALUATING, TRAINING = 0, 1, 2


class JoinState:
    """Which data-parallel ranks still have batches, exchanged before every step inside ``model.join()``."""

    def __init__(self, runtime: Runtime, throw_on_early_termination: bool) -> None:
        """For the calling rank's data-parallel group."""
        collectives = runtime[ReplicaCollectives].dp
        assert collectives is not None, "there is a data-parallel group to agree in"
        self._runtime = runtime
        self._collectives = collectives
        self._throw = throw_on_early_termination
        #: The global ranks that run the step.
        self.active_ranks: list[int] = list(runtime.place.dp_ranks)

    def begin_step(self, parts: Sequence[ModelPart], num_models: int) -> None:
        """Begin a step on a rank that has no batch."""
        for collectives in self._runtime[ReplicaCollectives].all:
            collectives.begin_step()
        participants(self._runtime, parts, num_models)

    def end_step(self) -> None:
        """End a step that succeeded, on a rank that had no batch."""
        for collectives in self._runtime[ReplicaCollectives].all:
            collectives.end_step()

    def exchange(self, status: int) -> int:
        """Exchange the status of all ranks, and return that of the ranks that still have batches.

        Raises:
            ShardwrightError: A rank has no batches left, and ``throw_on_early_termination`` is set.
        """
        ranks = self._runtime.place.dp_ranks
        notes = torch.zeros(len(ranks), dtype=torch.uint8, device=self._runtime.place.device)
        notes[ranks.index(self._runtime.place.rank)] = status
        self._collectives.maximum(notes)
        said = notes.tolist()
        self.active_ranks = [rank for rank, note in zip(ranks, said, strict=True) if note != EXHAUSTED]
        if self._throw and len(self.active_ranks) < len(ranks):
            gone = sorted(set(ranks) - set(self.active_ranks))
            raise ShardwrightError(
                f"data-parallel ranks {gone} have no batches left before step {self._runtime.step.number}, and join() "
                "was asked to raise then (throw_on_early_termination=True)"
            )
        return int(max(said))

    def begin_own_step(self) -> None:
        """Announce that this rank runs the step."""
        self.exchange(TRAINING if torch.is_grad_enabled() else EVALUATING)
