"""``DistributedModel.join``: the steps of a rank that has no batches left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardwright.data_parallel.uneven import EXHAUSTED, TRAINING, JoinState
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
    """Implement ``DistributedModel.join``."""
    join_state = JoinState(runtime, throw_on_early_termination)
    replicas.join_state = join_state
    replicas.divides_by_group = divide_by_initial_world_size
    try:
        yield
        last_active = join_state.active_ranks
        while True:
            begin_step(runtime)
            join_state.begin_step(runtime[Models].placements, runtime[Models].count)
            runtime.begin_step_alone("join")
            status = join_state.exchange(EXHAUSTED)
            if status == EXHAUSTED:
                break
            last_active = join_state.active_ranks
            if status == TRAINING:
                replicas.step_without_batch()
            runtime[Updates].skip_updates()
            vote(runtime)
            if status == TRAINING:
                replicas.end_step()
            join_state.end_step()
            runtime.server.leave_step()
        runtime.server.leave_step()
        replicas.take_over_from(last_active[-1])
        runtime[Updates].forget()
    finally:
        replicas.join_state = None
        replicas.divides_by_group = True
