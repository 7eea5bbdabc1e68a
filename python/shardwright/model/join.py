"""``DistributedModel.join``: the steps of a rank that has no batches left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardwright.data_parallel.replicas import Replicas
from shardwright.data_parallel.uneven import EXHAUSTED, TRAINING, JoinState
from shardwright.half_precision import LossScaling
from shardwright.job.objects import gathered
from shardwright.job.ranks import DP_GROUP
from shardwright.job.runtime import Runtime
from shardwright.model.models import Models
from shardwright.model.updates import Updates
from shardwright.model.vote import vote
from shardwright.timeline.trace import begin_step


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
            replicas.step_without_batch(trains=status == TRAINING)
            runtime[Updates].skip_updates()
            vote(runtime)
            replicas.end_step(trains=status == TRAINING)
            join_state.end_step()
            runtime.server.leave_step()
        runtime.server.leave_step()
        replicas.take_over_from(last_active[-1])
        _take_over_half_precision(runtime, last_active[-1])
        runtime[Updates].forget()
    finally:
        replicas.join_state = None
        replicas.divides_by_group = True


def _take_over_half_precision(runtime: Runtime, rank: int) -> None:
    """Give all replicas the loss scale of a rank that trained longest, and equal master weights."""
    scaler = runtime[LossScaling].scaler
    if scaler is not None:
        states = gathered("model.join", scaler.state_dict(), DP_GROUP)
        scaler.load_state_dict(states[runtime.place.dp_ranks.index(rank)])
    for optimizer in runtime[Models].optimizers:
        if optimizer.has_masters:
            optimizer.reload_model_params()
