"""Errors of tasks that come from microbatches' order: they are not the script's, and the step is run again."""

from __future__ import annotations

from shardwright.errors import ShardwrightError
from shardwright.execution.placed import placed_models
from shardwright.execution.state_order import all_kept
from shardwright.execution.task import RunningTask, may_overlap, state_write
from shardwright.failure_text import FailureText


def as_state_write(task: RunningTask, error: BaseException) -> BaseException:
    """The error of a task, or what it comes from; where it comes again with one microbatch after another, its own.

    A later microbatch may have written to what an earlier one's backward needs, which one process would have run by
    then. Or the step has changed something without a trace's knowledge, and a microbatch has found it as another one
    left it: an attribute that is deleted, a list that is empty.
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
