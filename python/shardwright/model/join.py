"""``DistributedModel.join``: the steps of a rank without batches left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardwright.data_parallel.uneven import LEFT, TRAINS, Attendance
from shardwright.model.models import Models
from shardwright.model.updates import Updates
from shardwright.model.vote import vote
from shardwright.timeline.trace import begin_step

if TYPE_CHECKING:
    from shardwright.data_parallel.replicas import Replicas
    from shardwright.job.runtime import Runtime


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
            begin_step(runtime)
            attendance.begin_step(runtime[Models].placements, runtime[Models].count)
            runtime.begin_step_alone("join")
            says = attendance.announce(LEFT)
            if says == LEFT:
                break
            last_present = attendance.present
            if says == TRAINS:
                replicas.shadow_step()
            runtime[Updates].stands_aside()
            vote(runtime)
            if says == TRAINS:
                replicas.end_step()
            runtime.server.leave_step()
        runtime.server.leave_step()
        replicas.take_over_from(last_present[-1])
        runtime[Updates].forget()
    finally:
        replicas.attendance = None
        replicas.divides_by_group = True
