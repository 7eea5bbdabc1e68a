"""The torch state that a task runs under; it travels with requests and is lost in a new thread otherwise."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from shardwright import _core
from shardwright.errors import FrameError
from shardwright.execution import forward_mode, other_weights, precision, process
from shardwright.execution.task import running_task
from shardwright.execution.turn import Turn
from shardwright.frames.grad_mode import GradMode

_AUTOCAST_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class TaskState:
    """What a request carries (the paper, appendix B): gradient, inference and autocast mode.

    Attributes:
        grad_mode: ``torch.is_grad_enabled()``.
        inference_mode: ``torch.is_inference_mode_enabled()``.
        autocast: For each device type under autocast its name, the dtype's name and whether casts are cached.
    """

    grad_mode: bool
    inference_mode: bool
    autocast: list[tuple[str, str, bool]]

    @staticmethod
    def capture() -> TaskState:
        """The calling thread's state."""
        autocast = [
            (device, str(torch.get_autocast_dtype(device)).removeprefix("torch."), torch.is_autocast_cache_enabled())
            for device in (_AUTOCAST_DEVICES if torch._C._is_any_autocast_enabled() else ())
            if torch.is_autocast_enabled(device)
        ]
        return TaskState(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)

    def applied(self) -> AbstractContextManager[Any]:
        """Run the block under this state, in a thread that has torch's defaults."""
        if self.inference_mode or self.autocast:
            return self._all_applied()
        return GradMode(self.grad_mode)

    @contextmanager
    def _all_applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.inference_mode:
                stack.enter_context(torch.inference_mode())
            for device, dtype, cache in self.autocast:
                stack.enter_context(torch.autocast(device, getattr(torch, dtype), cache_enabled=cache))
            stack.enter_context(torch.set_grad_enabled(self.grad_mode))
            yield


def default_device(what: str) -> torch.device | None:
    """The calling thread's default device, None when it is not set.

    Raises:
        FrameError: A torch mode is active that cannot follow into other threads; ``what`` was done under it.
    """
    if not torch._C._len_torch_function_stack() and not torch._C._len_torch_dispatch_stack():
        return None  # the ordinary case, at every call
    device = None
    for mode in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
        if not isinstance(mode, DeviceContext):
            raise FrameError(
                f"{what} under the torch function mode {type(mode).__name__}, which does not reach modules on other "
                "ranks: enter it inside the module that needs it"
            )
        device = mode.device
    modes = _get_current_dispatch_mode_stack()
    if modes:
        raise FrameError(
            f"{what} under the torch dispatch mode {type(modes[-1]).__name__}, which does not reach modules on other "
            "ranks: enter it inside the module that needs it"
        )
    return device


_NOTHING: AbstractContextManager[None] = nullcontext()


def on_device(device: torch.device | None) -> AbstractContextManager[Any]:
    """Run the block with a default device, or without one."""
    return _NOTHING if device is None else device


@dataclass(frozen=True, slots=True)
class StepState:
    """What the script's own thread had set when it called the step function; every task on this rank starts from it.

    Attributes:
        variables: Context variables.
        task: Gradient, inference and autocast mode.
        device: The default device, None when it is not set.
        settings: What torch keeps for the whole process.
        thread: What torch keeps for each thread.
        random: The states of the random number generators.
        seed: What the script last seeded the default generator with.
        cuda_stream: The current stream of the current CUDA device, None without CUDA.
    """

    variables: contextvars.Context
    task: TaskState
    device: torch.device | None
    settings: process.Settings
    thread: process.Settings
    random: process.RandomState
    seed: int
    cuda_stream: torch.cuda.Stream | None

    @staticmethod
    def capture() -> StepState:
        """The calling thread's state; raises :class:`FrameError` for modes that cannot follow into other threads."""
        device = default_device("the step function was called")
        if saved_tensor_hooks_are_set():
            raise FrameError(
                "the step function was called inside torch.autograd.graph.saved_tensors_hooks (or save_on_cpu), which "
                "do not reach modules on other ranks: use them inside the module that needs them"
            )
        cuda = torch.cuda.current_stream() if process.cuda_in_use() else None
        precision.forget()
        return StepState(
            contextvars.copy_context(),
            TaskState.capture(),
            device,
            process.settings(),
            process.thread_settings(),
            process.random_state(),
            torch.initial_seed(),
            cuda,
        )

    def applied(self) -> AbstractContextManager[Any]:
        """Set the thread's CUDA stream, the process's settings and its own, and its default device for the block."""
        if self.cuda_stream is not None:
            # With its device. A new thread has the default stream, and what it made there would be unordered with what
            # the script does on its own.
            torch.cuda.set_stream(self.cuda_stream)
        process.restore_settings(self.settings)
        process.set_thread(self.thread)
        return on_device(self.device)

    def restore(self) -> None:
        """After a step: put back what its tasks may have left changed, the random number generators too."""
        process.restore_settings(self.settings)
        process.restore_random_state(self.random)


def context_of(
    what: str,
    state: TaskState,
    script: StepState,
    *,
    checkpointing: bool,
    hooks: bool,
    collector: list[tuple[str, int | _core.Spec]] | None,
) -> _core.TorchContext:
    """The torch state of a call, with what the calling task has changed of the script's device and settings.

    Args:
        what: The call, for errors.
        state: The calling task's.
        script: What the step began with.
        checkpointing: Whether the module is to be checkpointed.
        hooks: Whether its hooks run.
        collector: What ``transformers`` collects.

    Raises:
        FrameError: A torch mode is active that cannot follow.
    """
    device = default_device(what)
    settings = process.difference(script.settings, script.thread)
    is_plain = hooks and not checkpointing and not settings and not state.autocast and not state.inference_mode
    if is_plain and device == script.device and collector is None:
        return _PLAIN[state.grad_mode]
    return _core.TorchContext(
        grad_mode=state.grad_mode,
        inference_mode=state.inference_mode,
        autocast=state.autocast,
        checkpointing=checkpointing,
        hooks=hooks,
        device=None if device == script.device else str(device),
        settings=settings,
        collector=collector,
    )


def as_carried(context: _core.TorchContext) -> AbstractContextManager[Any]:
    """Run the block under the torch state of a call, in a thread that has torch's defaults."""
    return GradMode(context.grad_mode) if context.is_plain else _as_carried(context)


@contextmanager
def _as_carried(context: _core.TorchContext) -> Iterator[None]:
    with TaskState(context.grad_mode, context.inference_mode, context.autocast).applied():
        if context.settings:
            process.change(context.settings)
        with on_device(None if context.device is None else torch.device(context.device)):
            yield


#: What nearly every call carries, by grad mode.
_PLAIN = {mode: _core.TorchContext(grad_mode=mode) for mode in (False, True)}


class Suspended:
    """A wait: puts back what is process-wide, or in modules, if another task had the turn and may have changed it."""

    __slots__ = ("_random", "_settings", "_task")

    def __enter__(self) -> None:
        """Begin to wait."""
        self._task = task = running_task()
        forward_mode.check_wait(task)
        other_weights.check_wait(task)
        if task is None:
            self.keep()
        else:
            task.runtime[Turn].waiting = self
        if torch._C._is_any_autocast_enabled():
            torch.clear_autocast_cache()  # it is the process's: another task's grad mode must not see these casts

    def keep(self) -> None:
        """Another task is about to get the turn."""
        self._settings, self._random = process.settings(), process.random_state()

    def __exit__(self, *_: object) -> None:
        """The task has the turn again."""
        if self._task is not None:
            turn = self._task.runtime[Turn]
            if turn.waiting is self:
                turn.waiting = None
                return
            turn.take(self._task)
        process.restore_settings(self._settings)
        process.restore_random_state(self._random)


def saved_tensor_hooks_are_set() -> bool:
    """Whether the calling thread is inside ``torch.autograd.graph.saved_tensors_hooks``."""
    autograd = torch._C._autograd
    if hasattr(autograd, "_top_saved_tensors_default_hooks"):  # since torch 2.8
        return autograd._top_saved_tensors_default_hooks(True) is not None
    disabled = autograd._saved_tensors_hooks_get_disabled_error_message()
    try:
        autograd._saved_tensors_hooks_disable("probing for hooks")  # raises when any are set
    except RuntimeError:
        return True
    finally:
        if disabled is None:
            autograd._saved_tensors_hooks_enable()
        else:
            autograd._saved_tensors_hooks_disable(disabled)
    return False
