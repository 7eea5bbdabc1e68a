"""Errors caused by the order of microbatches, or by predictions, and not by the script; the step is then run again."""

from __future__ import annotations

from shardwright import _core
from shardwright.errors import ConfigError, ShardwrightError
from shardwright.execution.placed import placed_models
from shardwright.execution.state_order import all_kept
from shardwright.execution.task import RunningTask, departure, may_overlap, state_write
from shardwright.failure_text import FailureText


def as_repeatable(task: RunningTask, error: BaseException) -> BaseException:
    """Return the error of a task, or the one that runs the step again if something else may have caused it."""
    return _as_state_write(task, _as_departure(task, error))


def _as_departure(task: RunningTask, error: BaseException) -> BaseException:
    """Return the error of a task, or a :class:`DepartureError` if tensor-parallel ranks may predict different calls.

    A rank that waits where another one goes on meets it in another collective, and both may find that before they
    compare what they predict. An error that recurs without predictions is the task's own.
    """
    place = task.runtime.place
    if not isinstance(error, ConfigError) or len(place.tp_ranks) == 1 or place.cfg.on_departure == "error":
        return error
    if not task.runtime[_core.Sites].predicts:
        return error
    return departure(task, f"the ranks of a tensor-parallel group may not know the same calls: {error}")


def _as_state_write(task: RunningTask, error: BaseException) -> BaseException:
    """Return the error of a task, or a :class:`StateWriteError` if the order of microbatches may have caused it.

    A later microbatch may have written to a tensor that the backward of an earlier one needs, which one process would
    have run before. Or the step has made a change that the trace did not see, and a microbatch has found what another
    one left: a deleted attribute, an empty list. An error that recurs when microbatches run one after another is the
    task's own.
    """
    runtime = task.runtime
    is_own = isinstance(error, ShardwrightError) or not isinstance(error, Exception)
    if is_own or not may_overlap(runtime):
        return error
    every = all_kept(placed_models(runtime))
    is_late_write = type(error) is RuntimeError and "modified by an inplace operation" in str(error)
    if is_late_write and any(kept.gated for kept in every):
        return state_write(
            task, f"a module keeps a tensor that a backward needs, and a later microbatch wrote to it first: {error}"
        )
    for kept in every:
        if (what := kept.changed_late(task)) is not None:
            why = "which the trace did not see, and microbatches may have found it in the middle of another"
            kind, message, _ = FailureText.of(error)
            return state_write(task, f"{what} was changed, {why}: {kind}: {message}")
    return error
