"""All ranks run a failed step again, or none."""

from __future__ import annotations

import contextlib
import functools
import socket
from typing import Any

from shardwright import _core, failure_text
from shardwright.errors import DepartureError, RemoteError, ShardwrightError, StateOrderError, StateWriteError
from shardwright.execution.state_order import StateOrder
from shardwright.job.exchange import receive_object
from shardwright.job.objects import send_on
from shardwright.job.received import decode_from
from shardwright.job.runtime import Runtime

_CHANNEL = "run again"
#: The reasons for which a step is run again, in the order in which ranks act on them.
_REASONS: dict[str, type[RemoteError]] = {
    one.__name__: one for one in (DepartureError, StateOrderError, StateWriteError)
}


def prepare(runtime: Runtime, name: str, error: RemoteError) -> None:
    """Agree to run the step function of this name again, and see to it that it does not fail for the same reasons.

    Raises:
        RemoteError: A rank has a reason that ends the step.
    """
    order, step = runtime[StateOrder], runtime.step.number
    if not runtime.server.would_run_again(step, runtime.place.cfg.on_departure != "error"):
        runtime.server.check_abort(step, [])  # a stronger reason came first here
        raise error
    for reason in _agreed(runtime, error):
        if isinstance(reason, StateOrderError):
            order.tighten(runtime, reason)
        else:
            order.departures += 1
            if len(runtime.place.tp_ranks) > 1 and not runtime[_core.Sites].restart():
                runtime.logger.warning(
                    "static mode predicts nothing from now on: too many steps departed from it; the calls of all "
                    "tensor-parallel ranks must be alike for it"
                )
        strictness = "; from now on microbatches run one after another" if order.one_at_a_time else ""
        where = f"rank {reason.rank}: {reason.message}"
        runtime.logger.warning("step %d (%s) is run again%s: %s", runtime.step.number, name, strictness, where)


def _agreed(runtime: Runtime, error: RemoteError) -> list[RemoteError]:
    """Return the reasons for which all ranks run the step that has failed again, the same on all of them.

    Ranks may have found different reasons at once. Each tells the others its own; those that have one of the script's,
    which ends the step, have told that when it failed.

    Args:
        runtime: This rank's runtime.
        error: Its own reason, one of those for which steps are run again.

    Raises:
        RemoteError: A rank has a reason that ends the step.
    """
    step, own = runtime.step.number, (type(error).__name__, *_fields(error))
    others = [rank for rank in range(runtime.place.launch.world_size) if rank != runtime.place.rank]
    try:
        found = [own]
        for rank in others:
            send_on(runtime, rank, _CHANNEL, (step, own))
        found += [_reason_of(runtime, rank, step) for rank in others]
    except ShardwrightError:
        raise
    except BaseException as interruption:  # the others may run it again already
        runtime.step.number += 1
        failure_text.report(runtime.server, interruption, step=runtime.step.number)
        raise
    if (ended := next((one for one in found if one[0] not in _REASONS), None)) is not None:
        raise RemoteError(*ended[1:])
    first = {kind: fields for kind, *fields in sorted(found, key=lambda one: one[1], reverse=True)}
    return [_REASONS[kind](*first[kind]) for kind in _REASONS if kind in first]


def refuse(runtime: Runtime, error: BaseException) -> None:
    """Tell ranks that may want to run a failed step again that this one does not; never raises."""
    if not runtime.server.would_run_again(runtime.step.number, True):
        return  # the others know it
    kind, message, _ = failure_text.FailureText.of(error)
    own = ("", runtime.place.rank, socket.gethostname(), None, None, None, kind, message)
    for rank in range(runtime.place.launch.world_size):
        if rank != runtime.place.rank:
            with contextlib.suppress(ShardwrightError):  # one that is gone needs no word
                send_on(runtime, rank, _CHANNEL, (runtime.step.number, own))


def _reason_of(runtime: Runtime, rank: int, step: int) -> tuple[Any, ...]:
    departures = runtime.place.cfg.on_departure != "error"
    check = functools.partial(runtime.server.check_run_again, step, departures)
    what = f"rank {rank} to run step {step} again"
    while True:
        number, reason = decode_from(runtime, rank, *receive_object(runtime, rank, _CHANNEL, what=what, beside=check))
        if number == step:
            return tuple(reason)


def _fields(error: RemoteError) -> tuple[Any, ...]:
    return error.rank, error.host, error.module, error.microbatch, error.phase, error.kind, error.message
