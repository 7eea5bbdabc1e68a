"""The torch state that a task runs under. It is sent with requests, because new threads do not inherit it."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from shardwright import _core
from shardwright.errors import FrameError
from shardwright.execution import forward_mode, other_weights, precision, process
from shardwright.execution.task import running_task
from shardwright.execution.turn import Turn
from shardwright.frames.checkpointing import Checkpointing

_AUTOCAST_DEVICES = ("cpu", "cuda")


class TaskState(NamedTuple):
    """Gradient, inference and autocast mode, which requests carry (the paper, appendix B).

    Attributes:
        grad_mode: ``torch.is_grad_enabled()``.
        inference_mode: ``torch.is_inference_mode_enabled()``.
        autocast: For each device type under autocast: its name, the dtype's name, and whether casts are cached.
    """

    grad_mode: bool
    inference_mode: bool
    autocast: list[tuple[str, str, bool]]

    @staticmethod
    def capture() -> TaskState:
        """Return the calling thread's state."""
        autocast = [
            (device, str(torch.get_autocast_dtype(device)).removeprefix("torch."), torch.is_autocast_cache_enabled())
            for device in (_AUTOCAST_DEVICES if torch._C._is_any_autocast_enabled() else ())
            if torch.is_autocast_enabled(device)
        ]
        return TaskState(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)

    def applied(self) -> AbstractContextManager[Any]:
        """Return a context manager that applies this state, in a thread that has torch's defaults."""
        if self.inference_mode or self.autocast:
            return self._all_applied()
        return _core.GradMode(self.grad_mode)

    @contextmanager
    def _all_applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.inference_mode:
                stack.enter_context(torch.inference_mode())
            for device, dtype, cache in self.autocast:
                stack.enter_context(torch.autocast(device, getattr(torch, dtype), cache_enabled=cache))
            stack.enter_context(torch.set_grad_enabled(self.grad_mode))
            yield


def default_device(what: object) -> torch.device | None:
    """Return the calling thread's default device; None if it is not set.

    Raises:
        FrameError: A torch mode is active that does not reach modules on other ranks. ``what`` was called under it.
    """
    if not torch._C._len_torch_function_stack() and not torch._C._len_torch_dispatch_stack():
        return None  # the usual case, checked at every call
    device = None
    for mode in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
        if not isinstance(mode, DeviceContext):
            raise FrameError(
                f"{what} was called under the torch function mode {type(mode).__name__}, which does not reach modules "
                "on other ranks: enter it inside the module that needs it"
            )
        device = mode.device
    modes = _get_current_dispatch_mode_stack()
    if modes:
        raise FrameError(
            f"{what} was called under the torch dispatch mode {type(modes[-1]).__name__}, which does not reach modules "
            "on other ranks: enter it inside the module that needs it"
        )
    return device


_NOTHING: AbstractContextManager[None] = nullcontext()


def on_device(device: torch.device | None) -> AbstractContextManager[Any]:
    """Return a context manager that sets the default device; None sets none."""
    return _NOTHING if device is None else device


@dataclass(frozen=True, slots=True)
class StepState:
    """The torch state of the script's thread when it called the step function; every task on this rank starts from it.

    Attributes:
        variables: Context variables.
        task: Gradient, inference and autocast mode.
        device: The default device; None if it is not set.
        settings: The settings that torch keeps per process.
        thread: The settings that torch keeps per thread.
        random: The states of the random number generators.
        seed: The seed that the script last set on the default generator.
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
        """Return the calling thread's state.

        Raises:
            FrameError: A torch mode or saved-tensor hooks are active, which do not reach modules on other ranks.
        """
        device = default_device("the step function")
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
        """Set the CUDA stream and the process and thread settings; return a context manager for the default device."""
        if self.cuda_stream is not None:
            # This sets the current device too. A new thread uses the default stream, and its work there would not be
            # ordered with the work on the script's stream.
            torch.cuda.set_stream(self.cuda_stream)
        process.restore_settings(self.settings)
        process.set_thread(self.thread)
        return on_device(self.device)

    def restore(self) -> None:
        """Restore the process's settings and random number generators, which tasks of a step may have changed."""
        process.restore_settings(self.settings)
        process.restore_random_state(self.random)


def context_of(
    what: object,
    script: StepState,
    *,
    checkpointing: Checkpointing | None,
    hooks: bool,
    collector: list[tuple[str, int | _core.Spec]] | None,
) -> _core.TorchContext:
    """Return the calling task's torch state for a call, including device and settings that differ from the script's.

    Args:
        what: What is called, for error messages.
        script: The state that the step began with.
        checkpointing: How the module is checkpointed; None if it is not.
        hooks: Whether the module's hooks run.
        collector: The outputs that ``transformers`` collects.

    Raises:
        FrameError: A torch mode is active that does not reach modules on other ranks.
    """
    device, state = default_device(what), TaskState.capture()
    settings = process.difference(script.settings, script.thread)
    is_plain = hooks and checkpointing is None and not settings and not state.autocast and not state.inference_mode
    if is_plain and device == script.device and collector is None:
        return _PLAIN[state.grad_mode]
    return _core.TorchContext(
        **state._asdict(),
        checkpointing=checkpointing,
        hooks=hooks,
        device=None if device == script.device else str(device),
        settings=settings,
        collector=collector,
    )


def as_carried(context: _core.TorchContext) -> AbstractContextManager[Any]:
    """Return a context manager that applies the torch state of a call, in a thread that has torch's defaults."""
    return _core.GradMode(context.grad_mode) if context.is_plain else _as_carried(context)


@contextmanager
def _as_carried(context: _core.TorchContext) -> Iterator[None]:
    with TaskState(context.grad_mode, context.inference_mode, context.autocast).applied():
        if context.settings:
            process.change(context.settings)
        with on_device(None if context.device is None else torch.device(context.device)):
            yield


#: The context that nearly every call carries, by grad mode.
_PLAIN = {mode: _core.TorchContext(grad_mode=mode) for mode in (False, True)}


class Suspended:
    """Context manager for a wait.

    If another task had the turn in the meantime, restore the process's settings and random number generators, and the
    microbatch's attributes of modules. Outside a task, restore settings and generators always.
    """

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
            torch.clear_autocast_cache()  # per process; another task's grad mode must not see these casts

    def keep(self) -> None:
        """Save settings and random state, because another task is about to get the turn."""
        self._settings, self._random = process.settings(), process.random_state()

    def __exit__(self, *_: object) -> None:
        """Restore what was saved, now that the task has the turn again."""
        if self._task is not None:
            turn = self._task.runtime[Turn]
            if turn.waiting is self:
                turn.waiting = None
                return
            turn.take(self._task)
        process.restore_settings(self._settings)
        process.restore_random_state(self._random)


def saved_tensor_hooks_are_set() -> bool:
    """Return whether the calling thread is inside ``torch.autograd.graph.saved_tensors_hooks``."""
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
