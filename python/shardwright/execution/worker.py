"""Worker threads: each holds one suspended Python stack; one per rank executes at a time (the paper, 4.2)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shardwright import _core, failure_text
from shardwright.errors import RemoteError, ShardwrightError, StepAborted
from shardwright.execution.context import StepState
from shardwright.execution.late import as_repeatable
from shardwright.execution.placed import placed_model
from shardwright.execution.serve import run_forward, run_request_backward, run_weight_gradients
from shardwright.execution.task import Phase, RunningTask, set_running_task
from shardwright.execution.turn import Turn
from shardwright.frames.guards import close_checkpoints
from shardwright.job.explained import explain
from shardwright.transformers_models import switching

if TYPE_CHECKING:
    from shardwright.job.runtime import Runtime

RootFunction = Callable[[int], None]

_BACKWARD = (_core.TaskKind.BACKWARD, _core.TaskKind.CLOSE, _core.TaskKind.WEIGHT_GRADIENT)


class WorkerPool:
    """Start threads when the execution server requests them, and run the tasks that it grants."""

    def __init__(self, runtime: Runtime) -> None:
        """Create an empty pool."""
        self._runtime = runtime
        self._threads: list[threading.Thread] = []
        self._state: StepState | None = None
        self._root: RootFunction | None = None
        #: The tasks in progress, by thread id.
        self.running: dict[int, RunningTask] = {}
        self._gone: set[int] = set()
        #: The exception that failed the current step on this rank, if one did.
        self.error: BaseException | None = None

    def begin_step(self, state: StepState, root: RootFunction | None) -> None:
        """Set the state that the step's tasks start from and, on the root, the function that root tasks run."""
        self._state, self._root, self.error = state, root, None

    def end_step(self) -> None:
        """Release what the step set."""
        self._runtime[Turn].end_step()
        self._state = self._root = None

    def start(self, worker: int) -> None:
        """Start a worker's thread."""
        thread = threading.Thread(target=self._loop, args=(worker,), name=f"shardwright-worker-{worker}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self, timeout: float) -> None:
        """Wait for the threads to end, once the server is closed."""
        for thread in self._threads:
            thread.join(timeout)
        self._threads.clear()

    def check(self) -> None:
        """Fail the step on every rank if a worker's thread has died, because its tasks can no longer report errors."""
        for worker, thread in enumerate(list(self._threads)):
            if (
                worker in self._gone
                or thread.native_id is None
                or os.path.exists(f"/proc/self/task/{thread.native_id}")
            ):
                continue
            self._gone.add(worker)
            self._runtime.server.worker_gone(worker)

    def _loop(self, worker: int) -> None:
        """Run tasks until the server closes; an error in a task fails the step on every rank."""
        server = self._runtime.server
        self._runtime.place.make_device_current()
        while True:
            try:
                task = server.next_task(worker)
            except BaseException as error:  # the thread cannot continue
                failure_text.report(server, error)
                return
            if task is None:
                return
            try:
                self._run_safely(worker, task)
            except BaseException as error:
                self.error = self.error or error
                failure_text.report(server, error, microbatch=task.microbatch)
            finally:
                del task

    def _run_safely(self, worker: int, task: _core.Task) -> None:
        state = self._state
        if state is None:
            return  # the main thread has abandoned the step
        phase: Phase = "backward" if task.kind in _BACKWARD else "forward"
        running = RunningTask(self._runtime, worker, None, task.microbatch, phase, state)
        set_running_task(running)
        self.running[threading.get_ident()] = running
        try:
            if task.request is not None:
                running.module = placed_model(self._runtime, task.request.model).name_of(task.request.module)
            state.variables.copy().run(self._run, task, running, state)
        except StepAborted as error:
            close_checkpoints(error)
        except BaseException as error:
            close_checkpoints(error)
            if not self._was_misled(running):
                self._fail(running, as_repeatable(running, error))
        finally:
            set_running_task(None)
            self.running.pop(threading.get_ident(), None)

    def _run(self, task: _core.Task, running: RunningTask, state: StepState) -> None:
        runtime = self._runtime
        if attributes := runtime[Turn].attributes:  # a peer knows from here on in which order its root runs them
            attributes.hides = not runtime.server.keeps_one_at_a_time()
        runtime[Turn].take(running)
        switching.begin_task()
        with state.applied():
            if task.token is not None:
                run_weight_gradients(runtime, task.token, running)
            elif task.request is None:
                assert self._root is not None, "only the root is granted root tasks"
                with state.task.applied():
                    self._root(task.microbatch)
                switching.end_step_function()
            elif task.kind == _core.TaskKind.FORWARD:
                run_forward(runtime, task.request, running)
            else:
                run_request_backward(runtime, task.request, running)

    def _was_misled(self, running: RunningTask) -> bool:
        """Return whether a failed task used predicted answers that were wrong; the step then fails for that reason."""
        try:
            for response in running.responses:
                response.verify()
        except StepAborted:
            return True
        except ShardwrightError:
            return False  # report the first error
        return False

    def _fail(self, running: RunningTask, error: BaseException) -> None:
        self.error = self.error or error
        place: dict[str, Any] = {
            "module": running.module,
            "microbatch": running.microbatch,
            "phase": running.phase,
        }
        if not isinstance(error, RemoteError):  # it already names the place
            explain(self._runtime, error)
            failure_text.add_note(error, running.describe())
        failure_text.report(self._runtime.server, error, **place)
