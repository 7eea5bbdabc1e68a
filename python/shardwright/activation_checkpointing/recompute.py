"""Run modules so that the backward computes them again."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from shardwright import _core
from shardwright.activation_checkpointing.arguments import Arguments
from shardwright.activation_checkpointing.isolation import State, isolated
from shardwright.errors import FrameError
from shardwright.execution import process
from shardwright.execution.task import running_task
from shardwright.frames import current_frame, in_frame
from shardwright.frames.checkpointing import Checkpointing
from shardwright.job.runtime import find_runtime
from shardwright.offloading import Kept, OffloadedActivations
from shardwright.tensor_parallel.module import DistributedModule

Run = Callable[..., Any]


class _Entered(threading.local):
    #: The module that is about to be called in a checkpoint of its own, so that its mark makes no second one.
    module: nn.Module | None = None


entered = _Entered()


def makes_graph() -> bool:
    """Return whether what is computed now can have a backward."""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def run_checkpointed(
    modules: Sequence[nn.Module], run: Run, how: Checkpointing, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Run modules that lie entirely on this rank, so that the backward computes them again from copied arguments.

    A checkpoint of the script begins before the arguments are computed. It computes them again too, so that later
    in-place writes to them do not matter. This checkpoint begins after they are computed, so it needs their values.

    Args:
        modules: The modules, of which the first is called first.
        run: The function that runs them.
        how: How they are checkpointed.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Returns:
        What ``run`` returns.
    """
    if not makes_graph():
        return run(*args, **kwargs)
    parts = list({part: None for module in modules for part in module.modules()})
    arguments = Arguments(args, kwargs, _keeper_of(modules[0]))
    copies = tuple(arguments.copies)
    if how.isolated and not arguments.need_gradients and not any(map(_is_trained, parts)):
        return run(*args, **kwargs)
    del arguments.copies  # torch keeps them, as saved tensors, until the backward has run
    state = None
    if how.isolated:
        state = State(parts, arguments.others, lasting=True)
        arguments.others = [state.lasting(other) for other in arguments.others]
    settings = process.settings()
    generators = _generators() if how.preserves_rng_state else None
    first: list[tuple[tuple[Any, ...], Mapping[str, Any]]] = [(args, kwargs)]

    def again(module: nn.Module, *saved: torch.Tensor) -> Any:
        entered.module = module if how.isolated else None
        try:
            if first:
                own_args, own_kwargs = first.pop()
                with nullcontext() if state is None else state.first_computation():
                    return run(*own_args, **own_kwargs)
            own_args, own_kwargs = arguments.again(saved)
            with (
                _recorded(),
                process.computing_under(settings),
                _generators_as(generators),
                nullcontext() if state is None else isolated(state),
                in_frame(None),  # what it registers on tensors of the second computation is for nobody
            ):
                return run(*own_args, **own_kwargs)
        finally:
            entered.module = None

    again.isolated = how.isolated  # type: ignore[attr-defined]
    del args, kwargs
    frame = current_frame()
    outside = None
    if frame is not None and how.isolated:
        outside, frame.checkpointing = frame.checkpointing, None  # what is called inside is part of this checkpoint
    try:
        with nullcontext() if _may_stop_early(parts) else set_checkpoint_early_stop(False):
            return checkpoint(
                MethodType(again, modules[0]),
                *copies,
                use_reentrant=False,
                preserve_rng_state=how.preserves_rng_state,
            )
    except RuntimeError as error:
        if "support saved tensor hooks" in str(error):  # of torch.func, or of disable_saved_tensors_hooks
            raise FrameError(
                f"{type(modules[0]).__name__} is checkpointed, and its forward uses a transform of torch.func (or "
                "disables saved_tensors_hooks), inside which PyTorch cannot free what is saved for the backward: "
                "checkpoint the modules around or inside it instead"
            ) from error
        raise
    finally:
        if frame is not None and how.isolated:
            frame.checkpointing = outside
        if state is not None:
            state.settle()


def _keeper_of(module: nn.Module) -> Kept | None:
    """Return what keeps the arguments of a call out of memory; None if that is not configured, and outside steps."""
    runtime = find_runtime()
    offloaded = None if runtime is None else runtime.find(OffloadedActivations)
    if runtime is None or offloaded is None or not runtime.step.running:
        return None
    task = running_task()
    if task is not None:
        return offloaded.begin_call(module, task.microbatch)
    return offloaded.begin_call(module, runtime.step.microbatch) if runtime.place.pp_size == 1 else None


@contextmanager
def _recorded() -> Iterator[None]:
    """Record the block in timelines as a second computation."""
    runtime, task = find_runtime(), running_task()
    if runtime is not None and runtime.place.pp_size == 1:
        recorder = runtime[_core.AloneRecorder]
        began = recorder.clock_ns()
        try:
            yield
        finally:
            recorder.recomputed(began)
    elif runtime is not None and task is not None:
        began = runtime.server.clock_ns()
        try:
            yield
        finally:
            runtime.server.recomputed(task.worker, began)
    else:
        yield


def _is_trained(module: nn.Module) -> bool:
    return any(parameter is not None and parameter.requires_grad for parameter in module._parameters.values())


def _may_stop_early(parts: Sequence[nn.Module]) -> bool:
    """Return whether the second computation may end where it has computed what the backward needs.

    Torch ends it with an exception, which TorchScript would turn into a different one. Collectives of tensor
    parallelism that are in progress then would have nobody who waits for them.
    """
    return not any(isinstance(part, torch.jit.ScriptModule | DistributedModule) for part in parts)


def _generators() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def _set_generators(states: tuple[Any, Any]) -> None:
    own, of_numpy = states
    random.setstate(own)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)


@contextmanager
def _generators_as(states: tuple[Any, Any] | None) -> Iterator[None]:
    """Draw random numbers of Python and NumPy from these states in the block; torch's are put back by torch."""
    if states is None:
        yield
        return
    now = _generators()
    _set_generators(states)
    try:
        yield
    finally:
        _set_generators(now)
