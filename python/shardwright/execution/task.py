"""The task that a thread is running, for error messages and for the calls made from it."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from shardwright.errors import DepartureError, StateWriteError
from shardwright.job.threads import set_task_of_thread, task_of_thread

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
        module: The name of the module that it runs; None for the step function.
        microbatch: The index of its microbatch.
        phase: ``"forward"`` or ``"backward"``.
        state: The torch state of the script when the step began.
        place: For a backward, the seed that identifies where in the microbatch its module was called; the same in
            every run.
        ordered: Whether it called a module that changes its state; callers must wait until the call is over.
        ending: Whether its code has run, and only its answers are still awaited.
        inside: The modules with state whose code it is running, the innermost last.
        computed_once: The check of code inside a checkpoint that is not recomputed; None outside such code.
        other_weights: The number of nested ``torch.func.functional_call`` calls that it is in.
        sets: Attributes that it has set although the trace saw no such change, with their previous values.
        returned: Tensors of their state that modules returned to it: module name, tensor and version.
        responses: The responses to its calls that have not arrived, or not completely.
        left_results: Whether results of its calls were left on the ranks that computed them.
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
    left_results: bool = False

    def describe(self) -> str:
        """Describe where the task runs, for an exception raised in it."""
        what = "the step function" if self.module is None else f"module {self.module!r}"
        host = socket.gethostname()
        return (
            f"(rank {self.runtime.place.rank} on host {host!r}, {self.phase} of {what}, microbatch {self.microbatch})"
        )


def running_task() -> RunningTask | None:
    """Return the calling thread's task; None outside a step. A thread of autograd's engine has its caller's."""
    task: Any = task_of_thread()
    running: RunningTask | None = task
    return running


def set_running_task(task: RunningTask | None) -> None:
    """Set the calling thread's task."""
    set_task_of_thread(task)


def may_overlap(runtime: Runtime) -> bool:
    """Return whether several microbatches of the current step may be in progress at once."""
    return runtime.step.num_microbatches > 1 and not runtime.server.runs_one_at_a_time()


def state_write(task: RunningTask, message: str) -> StateWriteError:
    """Return the error that makes a task's step run again, one microbatch after another."""
    return StateWriteError(*_place_of(task), "StateWriteError", message)


def departure(task: RunningTask, message: str) -> DepartureError:
    """Return the error that makes a task's step run again, without predictions."""
    return DepartureError(*_place_of(task), "DepartureError", message)


def _place_of(task: RunningTask) -> tuple[int, str, str | None, int, Phase]:
    """Return where a task runs, as a :class:`RemoteError` takes it."""
    return task.runtime.place.rank, socket.gethostname(), task.module, task.microbatch, task.phase
