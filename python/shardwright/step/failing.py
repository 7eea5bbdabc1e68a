"""Ends a failed step: notifies every rank, and undoes the step's changes on this rank."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable

from shardwright import failure_text
from shardwright.caches import CacheTable
from shardwright.data_parallel.collectives import ReplicaCollectives
from shardwright.errors import PartialUpdateError, RemoteError, StepAborted
from shardwright.execution.frame_table import FrameTable
from shardwright.execution.state_order import rollback
from shardwright.execution.worker import WorkerPool
from shardwright.job.explained import explain
from shardwright.job.queued import QueuedCollectives
from shardwright.job.runtime import Runtime
from shardwright.model.models import Models
from shardwright.model.updates import Updates
from shardwright.step.transaction import StepTransaction
from shardwright.tensor_parallel.group import TensorGroup

#: How long a failed step waits for a running task. After that it continues without waiting.
_UNWIND_SECONDS = 1.0


def fail_step(runtime: Runtime, error: BaseException, transaction: StepTransaction) -> None:
    """End a failed step: notify every rank, unless the failure came from another rank or a task, and undo it here.

    Further errors do not prevent the notification, nor the undoing of everything that can be undone.
    """
    if not isinstance(error, RemoteError):
        explain(runtime, error)
    here = f"rank {runtime.place.rank} on host {socket.gethostname()!r}"
    updates = runtime[Updates]
    elsewhere = isinstance(error, RemoteError) and error.rank != runtime.place.rank  # which refuses, if it had voted
    if runtime.step.voted and not elsewhere and not isinstance(error, (StepAborted, PartialUpdateError)):
        updates.refuse(
            f"step {runtime.step.number} failed on {here} when other ranks knew already that it would succeed"
        )
    attempt = functools.partial(_attempt, runtime)
    attempt(functools.partial(_report, runtime, error))
    attempt(runtime[QueuedCollectives].abandon)
    if runtime.place.launch.world_size > 1 and not attempt(functools.partial(runtime.server.unwind, _UNWIND_SECONDS)):
        # The script's thread may have raised the error, for example at a signal, while a task runs.
        updates.refuse(
            f"step {runtime.step.number} was undone on {here} while a module still computed, whose gradients came "
            "too late to be undone"
        )
    runtime.step.voted = runtime.step.committing = False
    runtime[FrameTable].clear()
    runtime[CacheTable].lose()
    runtime[WorkerPool].end_step()
    runtime[WorkerPool].error = None  # it would keep the tensors of the functions that it has passed through
    runtime[Models].pending_controls.clear()
    undone = [attempt(transaction.rollback), attempt(functools.partial(_put_back_state, runtime))]
    undone += [attempt(placement.replicas.abandon_step) for placement in runtime[Models].placements]
    undone += [attempt(placement.reset_shards) for placement in runtime[Models].placements]
    if (group := runtime.find(TensorGroup)) is not None:
        group.abandon_step()
    for collectives in runtime[ReplicaCollectives].all:
        collectives.abandon_step(waits=isinstance(error, (Exception, StepAborted)))
    if not all(undone):
        updates.refuse(f"step {runtime.step.number} failed on {here}, and could not be undone there")


def _put_back_state(runtime: Runtime) -> None:
    """Restore the state that modules keep."""
    if (lost := rollback(runtime)) is not None:
        runtime.logger.warning("%s", lost)
        runtime[Updates].refuse(
            lost, "give it the values that it had, and call smp.resume_after_failure(error) on every rank"
        )


def _attempt(runtime: Runtime, part: Callable[[], object]) -> bool:
    """Run one part of the end of a failed step, and return whether it neither raised nor returned False."""
    try:
        return part() is not False
    except BaseException:  # the remaining parts must run too
        runtime.logger.warning(
            "rank %d could not clean up after step %d", runtime.place.rank, runtime.step.number, exc_info=True
        )
        return False


def _report(runtime: Runtime, error: BaseException) -> None:
    if runtime.place.launch.world_size == 1:
        return
    if error is runtime[WorkerPool].error:
        return
    if not isinstance(error, RemoteError):  # its message names the rank
        failure_text.add_note(
            error, f"(rank {runtime.place.rank} on host {socket.gethostname()!r}, step {runtime.step.number})"
        )
    failure_text.report(runtime.server, error, step=runtime.step.number)
