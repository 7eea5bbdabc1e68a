"""What the whole process has once, though each task must see its own: settings, output, and random numbers."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

#: Values in the order of :data:`_SETTINGS`.
Settings = tuple[Any, ...]
#: Copies of the default generators: the CPU's, and the state of the current CUDA device's.
RandomState = tuple[torch.Generator, dict[int, torch.Tensor]]


def _set_deterministic(value: bool) -> None:
    torch.use_deterministic_algorithms(value, warn_only=torch._C._get_deterministic_algorithms_warn_only())


def _set_deterministic_warnings(value: bool) -> None:
    torch.use_deterministic_algorithms(torch._C._get_deterministic_algorithms(), warn_only=value)


def _set_anomaly(value: bool) -> None:
    torch.set_anomaly_enabled(value, torch.is_anomaly_check_nan_enabled())


def _set_anomaly_check_nan(value: bool) -> None:
    torch.set_anomaly_enabled(torch.is_anomaly_enabled(), value)


def _warning_filters() -> tuple[int, list[Any]]:
    return id(warnings.filters), warnings.filters  # type: ignore[return-value]


def _set_warning_filters(value: tuple[int, list[Any]]) -> None:
    warnings.filters = value[1]
    warnings._filters_mutated()  # type: ignore[attr-defined]


_Setting = tuple[str, Callable[[], Any], Callable[[Any], None]]

#: What the ranks are told of whose modules a task calls.
_SENT: tuple[_Setting, ...] = (
    ("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    ("flash attention", torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    ("memory-efficient attention", torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    ("mathematical attention", torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    ("cuDNN attention", torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    ("matrix product precision", torch._C._get_float32_matmul_precision, torch._C._set_float32_matmul_precision),
    ("deterministic algorithms", torch._C._get_deterministic_algorithms, _set_deterministic),
    (
        "deterministic algorithms' warnings",
        torch._C._get_deterministic_algorithms_warn_only,
        _set_deterministic_warnings,
    ),
    ("anomaly detection", torch.is_anomaly_enabled, _set_anomaly),
    ("anomaly detection's check for NaN", torch.is_anomaly_check_nan_enabled, _set_anomaly_check_nan),
    ("cuDNN", torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    ("cuDNN benchmark", torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    ("cuDNN determinism", torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    ("oneDNN", torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    ("fast path of encoders", torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    ("repeated warnings", torch._C._get_warnAlways, torch._C._set_warnAlways),
    (
        "checks of sparse tensors",
        torch._C._check_sparse_tensor_invariants,
        torch._C._set_check_sparse_tensor_invariants,
    ),
    (
        "filling of new memory",
        torch._C._get_deterministic_fill_uninitialized_memory,
        torch._C._set_deterministic_fill_uninitialized_memory,
    ),
    (
        "overwriting of converted parameters",
        torch.__future__.get_overwrite_module_params_on_conversion,
        torch.__future__.set_overwrite_module_params_on_conversion,
    ),
    (
        "swapping of converted parameters",
        torch.__future__.get_swap_module_params_on_conversion,
        torch.__future__.set_swap_module_params_on_conversion,
    ),
)
#: What each thread has for itself, and a new one as torch has it at first.
_OF_THREADS: tuple[_Setting, ...] = (
    ("autocast's cache", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    ("threads of the backward", torch._C._is_multithreading_enabled, torch._C._set_multithreading_enabled),
    ("replayed views", torch._C._is_view_replay_enabled, torch._C._set_view_replay_enabled),
)
_THREAD_GETTERS = [get for _, get, _ in _OF_THREADS]
#: Objects of this process: what `warnings.catch_warnings` and `contextlib.redirect_stdout` exchange.
_OWN: tuple[_Setting, ...] = (
    ("warning filters", _warning_filters, _set_warning_filters),
    ("standard output", lambda: sys.stdout, lambda value: setattr(sys, "stdout", value)),
    ("standard error", lambda: sys.stderr, lambda value: setattr(sys, "stderr", value)),
)
_SETTINGS = (*_SENT, *_OWN)
_GETTERS = [get for _, get, _ in _SETTINGS]


def cuda_in_use() -> bool:
    """Whether this process has begun to use CUDA."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def keep_device_guard() -> None:
    """Let modules be compiled in threads that end, where torch was built for CUDA and there is no device.

    Compiling exchanges torch's guard of CUDA devices for an empty one, which belongs to the thread that does so and is
    freed with it (torch 2.11): the next compilation would crash. What this thread exchanges stays.
    """
    exchange = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if exchange is not None and not torch.cuda.is_available():
        exchange()


@functools.cache
def end_forks_at_once() -> None:
    """Let processes that are forked from this one end without a wait for threads that they do not have.

    Torch's autograd engine waits for its threads when a process ends, ten seconds where they never come.
    """

    def at_fork() -> None:
        atexit.register(os.environ.__setitem__, "TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT", "0")

    os.register_at_fork(after_in_child=at_fork)


def settings() -> Settings:
    """The process's settings now."""
    return tuple([get() for get in _GETTERS])


def restore_settings(wanted: Settings) -> None:
    """Make the settings what they were."""
    now = settings()
    if now != wanted:
        for (_, _, set_), value, other in zip(_SETTINGS, wanted, now, strict=True):
            if value != other:
                set_(value)


def thread_settings() -> Settings:
    """The settings of the calling thread now."""
    return tuple([get() for get in _THREAD_GETTERS])


def set_thread(wanted: Settings) -> None:
    """Make the settings of the calling thread these."""
    if wanted != thread_settings():
        for (_, _, set_), value in zip(_OF_THREADS, wanted, strict=True):
            set_(value)


def difference(before: Settings, after: Settings) -> dict[str, Any]:
    """The settings in ``after`` that are not as they were ``before``, by name; less objects of this process."""
    if before == after:
        return {}
    return {name: new for (name, _, _), old, new in zip(_SENT, before, after, strict=False) if old != new}


def changed(base: Settings, different: dict[str, Any]) -> Settings:
    """``base`` with some settings changed."""
    return tuple(different.get(name, value) for (name, _, _), value in zip(_SETTINGS, base, strict=True))


def random_state() -> RandomState:
    """The states of the default generators in use."""
    generator = torch.default_generator.clone_state()  # cheaper than the state as a tensor
    if not cuda_in_use():
        return generator, {}
    device = torch.cuda.current_device()
    return generator, {device: torch.cuda.get_rng_state(device)}


def restore_random_state(state: RandomState) -> None:
    """Put the generators back."""
    torch.default_generator.set_state(state[0].get_state())
    for device, one in state[1].items():
        torch.cuda.set_rng_state(one, device)


def seed(seed: int) -> None:
    """Start random numbers anew.

    Only the generators' states are set: what the script seeded them with stays what it was for the script.
    """
    torch.default_generator.manual_seed(seed)
    if cuda_in_use():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)
