"""The torch state that a task runs under; it travels with requests and is lost in a new thread otherwise."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from shardwright.errors import FrameError

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
            for device in _AUTOCAST_DEVICES
            if torch.is_autocast_enabled(device)
        ]
        return TaskState(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Run the block under this state, in a thread that has torch's defaults."""
        with ExitStack() as stack:
            if self.inference_mode:
                stack.enter_context(torch.inference_mode())
            for device, dtype, cache in self.autocast:
                stack.enter_context(torch.autocast(device, getattr(torch, dtype), cache_enabled=cache))
            stack.enter_context(torch.set_grad_enabled(self.grad_mode))
            yield


@dataclass(frozen=True, slots=True)
class StepState:
    """What the script's own thread had set when it called the step function; every task on this rank starts from it.

    Attributes:
        variables: Context variables.
        task: Gradient, inference and autocast mode.
        device: The default device, None when it is not set.
        dtype: The default dtype.
        cuda_device: The current CUDA device, None without CUDA.
    """

    variables: contextvars.Context
    task: TaskState
    device: torch.device | None
    dtype: torch.dtype
    cuda_device: int | None

    @staticmethod
    def capture() -> StepState:
        """The calling thread's state; raises :class:`FrameError` for modes that cannot follow into other threads."""
        device = None
        for mode in _get_current_function_mode_stack():
            if not isinstance(mode, DeviceContext):
                raise FrameError(
                    f"the step function was called under the torch function mode {type(mode).__name__}, which does "
                    "not reach modules on other ranks: enter it inside the module that needs it"
                )
            device = mode.device
        modes = _get_current_dispatch_mode_stack()
        if modes:
            raise FrameError(
                f"the step function was called under the torch dispatch mode {type(modes[-1]).__name__}, which does "
                "not reach modules on other ranks: enter it inside the module that needs it"
            )
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            raise FrameError(
                "the step function was called inside torch.autograd.graph.saved_tensors_hooks (or save_on_cpu), which "
                "do not reach modules on other ranks: use them inside the module that needs them"
            )
        cuda = torch.cuda.current_device() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
        return StepState(
            contextvars.copy_context(), TaskState.capture(), device, torch.get_default_dtype(), cuda
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Set the thread's default device, CUDA device and default dtype for the block."""
        if self.cuda_device is not None:
            torch.cuda.set_device(self.cuda_device)
        if torch.get_default_dtype() != self.dtype:
            torch.set_default_dtype(self.dtype)
        if self.device is None:
            yield
        else:
            with self.device:
                yield


@contextmanager
def suspended() -> Iterator[None]:
    """Around a wait: puts back what is process-wide and another task may have changed meanwhile."""
    dtype = torch.get_default_dtype()
    try:
        yield
    finally:
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)
