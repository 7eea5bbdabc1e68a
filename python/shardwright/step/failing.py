"""The end of a step that has failed: every rank is told, and all that it did here is undone."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from shardwright import failure_text
from shardwright.errors import PartialUpdateError, RemoteError, StepAborted
from shardwright.execution import stays

if TYPE_CHECKING:
    from shardwright.runtime import Runtime
    from shardwright.step.transaction import StepTransaction

#: How long a failed step waits for a task that still runs; it is left to itself after that.
_UNWIND_SECONDS = 1.0


def fail_step(runtime: Runtime, error: BaseException, transaction: StepTransaction) -> None:
    """End a failed step: tell every rank, unless the failure came from elsewhere or from a task; undo it here.

    Whatever goes wrong meanwhile, every rank is told, and all is undone that can be.
    """
    here = f"rank {runtime.rank} on host {socket.gethostname()!r}"
    updates = runtime.updates
    if runtime.voted and not isinstance(error, (RemoteError, StepAborted, PartialUpdateError)):
        updates.refuse(f"step {runtime.step} failed on {here} when other ranks knew already that it would succeed")
    attempt = functools.partial(_attempt, runtime)
    attempt(functools.partial(_report, runtime, error))
    if runtime.launch.world_size > 1 and not attempt(functools.partial(runtime.server.unwind, _UNWIND_SECONDS)):
        # The script's thread may be the one that raised, at a signal for example, while a task runs.
        updates.refuse(
            f"step {runtime.step} was taken back on {here} while a module still computed, whose gradients came too "
            "late to be taken back"
        )
    runtime.voted = runtime.committing = False
    runtime.frames.clear()
    runtime.workers.end_step()
    runtime.pending_controls.clear()
    undone = [attempt(transaction.rollback), attempt(functools.partial(stays.rollback, runtime))]
    undone += [attempt(placement.replicas.abandon_step) for placement in runtime.placements]
    if runtime.tensor_group is not None:
        runtime.tensor_group.abandon_step()
    for collectives in runtime.all_collectives:
        collectives.abandon_step(waits=isinstance(error, (Exception, StepAborted)))
    if not all(undone):
        updates.refuse(f"step {runtime.step} failed on {here}, and could not be taken back there")


def _attempt(runtime: Runtime, part: Callable[[], object]) -> bool:
    """Do a part of what ends a failed step; whether it went well and did not return False."""
    try:
        return part() is not False
    except BaseException:  # what comes after it has to be done, too
        runtime.logger.warning("rank %d could not end step %d in good order", runtime.rank, runtime.step, exc_info=True)
        return False


def _report(runtime: Runtime, error: BaseException) -> None:
    if runtime.launch.world_size == 1:
        return
    if error is runtime.workers.error:
        return
    if not isinstance(error, RemoteError):  # which says where itself
        failure_text.add_note(error, f"(rank {runtime.rank} on host {socket.gethostname()!r}, step {runtime.step})")
    failure_text.report(runtime.server, error, step=runtime.step)
