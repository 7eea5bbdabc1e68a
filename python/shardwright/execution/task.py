"""Which task a thread is running: for errors, and for the calls made from it."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from shardwright.errors import StateWriteError
from shardwright.job.threads import thread

if TYPE_CHECKING:
    import torch
    from torch import nn

    from shardwright.execution.computed_once import ComputedOnce
    from shardwright.execution.context import StepState
    from shardwright.execution.results import Response
    from shardwright.job.runtime import Runtime

#: Names a phase in messages and errors; a type checker finds a misspelt one.
Phase = Literal["forward", "backward"]


@dataclass(slots=True)
class RunningTask:
    """The task of the calling worker thread.

    Attributes:
        runtime: The runtime that runs it.
        worker: The worker's id in the execution server.
        module: The module that runs, None for the step function.
        microbatch: Its microbatch.
        phase: What it runs.
        state: What the script had set when the step began.
        place: Of a backward: where in the microbatch its module was called, the same in every run.
        ordered: Whether it called a module that changes what it keeps: nobody may go on before that is over.
        ending: Whether its code has run, and only the result is to be taken.
        inside: The modules that keep something and that its code is in, the innermost last.
        computed_once: The code of the innermost that runs inside a checkpoint and is not computed again, if any does.
        other_weights: In how many calls with other weights its code is (``torch.func.functional_call``).
        sets: Attributes that it has set and the trace did not see, with their previous values.
        returned: Of what modules keep, what they returned to it: their names, tensors, and the versions of those.
        responses: The answers to its calls that are not here, or not whole.
    """

    runtime: Runtime
    worker: int
    module: str | None
    microbatch: int
    phase: Phase
    state: StepState
    place: int = 0
    ordered: bool = False
    ending: bool = False
    inside: list[nn.Module] = field(default_factory=list)
    computed_once: ComputedOnce | None = None
    other_weights: int = 0
    sets: list[tuple[nn.Module, str, Any]] = field(default_factory=list)
    returned: list[tuple[str, torch.Tensor, int]] = field(default_factory=list)
    responses: list[Response] = field(default_factory=list)

    def describe(self) -> str:
        """Where the task runs, for an exception raised in it."""
        what = "the step function" if self.module is None else f"module {self.module!r}"
        host = socket.gethostname()
        return (
            f"(rank {self.runtime.place.rank} on host {host!r}, {self.phase} of {what}, microbatch {self.microbatch})"
        )


def running_task() -> RunningTask | None:
    """The calling thread's task, or None outside a step."""
    task: Any = thread.task
    running: RunningTask | None = task
    return running


def set_running_task(task: RunningTask | None) -> None:
    """Set the calling thread's task."""
    thread.task = task


def may_overlap(runtime: Runtime) -> bool:
    """Whether microbatches of the step that runs may be under way beside one another."""
    return runtime.step.num_microbatches > 1 and not runtime.server.runs_one_at_a_time()


def state_write(task: RunningTask, message: str) -> StateWriteError:
    """What has the step of a task run again, one microbatch after another."""
    place = (task.runtime.place.rank, socket.gethostname(), task.module, task.microbatch, task.phase)
    return StateWriteError(*place, "StateWriteError", message)
