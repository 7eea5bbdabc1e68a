"""Uneven inputs: ranks without batches left take part in the others' collectives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from shardwright.data_parallel.participants import participants
from shardwright.errors import ShardwrightError

if TYPE_CHECKING:
    from shardwright.data_parallel.replicas import Replicas
    from shardwright.runtime import Runtime

#: What a rank says of itself before a step.
_LEFT, _EVALUATES, _TRAINS = 0, 1, 2


class Attendance:
    """Who of the data-parallel group still has batches, agreed on before every step inside ``model.join()``."""

    def __init__(self, runtime: Runtime, throw_on_early_termination: bool) -> None:
        """For the calling rank's data-parallel group."""
        assert runtime.collectives is not None, "there is a data-parallel group to agree in"
        self._runtime = runtime
        self._collectives = runtime.collectives
        self._throw = throw_on_early_termination
        #: The global ranks that take part in the step.
        self.present: list[int] = list(runtime.dp_ranks)

    def begin_step(self) -> None:
        """Begin a step in which this rank runs nothing of its own."""
        for collectives in self._runtime.all_collectives:
            collectives.begin_step()
        participants(self._runtime, self._runtime.placements)

    def announce(self, says: int) -> int:
        """Exchange what the ranks do next; returns what those who are left do.

        Raises:
            ShardwrightError: A rank has no batches left, and that was to be an error.
        """
        ranks = self._runtime.dp_ranks
        notes = torch.zeros(len(ranks), dtype=torch.uint8, device=self._runtime.device)
        notes[ranks.index(self._runtime.rank)] = says
        self._collectives.maximum(notes)
        said = notes.tolist()
        self.present = [rank for rank, note in zip(ranks, said, strict=True) if note != _LEFT]
        if self._throw and len(self.present) < len(ranks):
            gone = sorted(set(ranks) - set(self.present))
            raise ShardwrightError(
                f"data-parallel ranks {gone} have no batches left before step {self._runtime.step}, and join() was "
                "asked to raise then (throw_on_early_termination=True)"
            )
        return int(max(said))

    def attend(self) -> None:
        """Say that this rank runs the step that begins."""
        self.announce(_TRAINS if torch.is_grad_enabled() else _EVALUATES)


@contextmanager
def joined(
    runtime: Runtime, replicas: Replicas, divide_by_initial_world_size: bool, throw_on_early_termination: bool
) -> Iterator[None]:
    """The body of ``DistributedModel.join``."""
    attendance = Attendance(runtime, throw_on_early_termination)
    replicas.attendance = attendance
    replicas.divides_by_group = divide_by_initial_world_size
    try:
        yield
        last_present = attendance.present
        while True:
            runtime.next_step()
            attendance.begin_step()
            runtime.begin_step_alone("join")
            says = attendance.announce(_LEFT)
            if says == _LEFT:
                break
            last_present = attendance.present
            if says == _TRAINS:
                replicas.shadow_step()
            runtime.updates.stands_aside()
            runtime.vote()
            if says == _TRAINS:
                replicas.end_step()
            runtime.server.leave_step()
        runtime.server.leave_step()
        replicas.take_over_from(last_present[-1])
        runtime.updates.forget()
    finally:
        replicas.attendance = None
        replicas.divides_by_group = True
