"""Settings, output streams and random number generators, which are per process but must be separate for each task."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from shardwright import _core
from shardwright.execution.precision import precision, set_precision

#: Values in the order of :data:`_SETTINGS`.
Settings = tuple[Any, ...]
#: A copy of the CPU's default generator, and the state of the current CUDA device's.
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


_Get = Callable[[], Any]
_Set = Callable[[Any], None]

_Sent = tuple[_core.TorchSetting, _Get, _Set]

#: Settings that are sent to the ranks whose modules a task calls.
_SENT: tuple[_Sent, ...] = (
    (_core.TorchSetting.DEFAULT_DTYPE, torch.get_default_dtype, torch.set_default_dtype),
    (_core.TorchSetting.FLASH_ATTENTION, torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (
        _core.TorchSetting.MEMORY_EFFICIENT_ATTENTION,
        torch._C._get_mem_efficient_sdp_enabled,
        torch._C._set_sdp_use_mem_efficient,
    ),
    (_core.TorchSetting.MATH_ATTENTION, torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (_core.TorchSetting.CUDNN_ATTENTION, torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    (_core.TorchSetting.PRECISION, precision, set_precision),
    (_core.TorchSetting.DETERMINISTIC, torch._C._get_deterministic_algorithms, _set_deterministic),
    (
        _core.TorchSetting.DETERMINISTIC_WARN_ONLY,
        torch._C._get_deterministic_algorithms_warn_only,
        _set_deterministic_warnings,
    ),
    (_core.TorchSetting.ANOMALY, torch.is_anomaly_enabled, _set_anomaly),
    (_core.TorchSetting.ANOMALY_CHECK_NAN, torch.is_anomaly_check_nan_enabled, _set_anomaly_check_nan),
    (_core.TorchSetting.CUDNN, torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (_core.TorchSetting.CUDNN_BENCHMARK, torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    (_core.TorchSetting.CUDNN_DETERMINISTIC, torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    (_core.TorchSetting.ONEDNN, torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (
        _core.TorchSetting.ENCODER_FAST_PATH,
        functools.partial(getattr, torch.backends.mha, "_is_fastpath_enabled"),
        torch.backends.mha.set_fastpath_enabled,
    ),
    (_core.TorchSetting.WARN_ALWAYS, torch._C._get_warnAlways, torch._C._set_warnAlways),
    (
        _core.TorchSetting.SPARSE_INVARIANTS,
        torch._C._check_sparse_tensor_invariants,
        torch._C._set_check_sparse_tensor_invariants,
    ),
    (
        _core.TorchSetting.FILL_UNINITIALIZED,
        torch._C._get_deterministic_fill_uninitialized_memory,
        torch._C._set_deterministic_fill_uninitialized_memory,
    ),
    (
        _core.TorchSetting.OVERWRITE_CONVERTED,
        torch.__future__.get_overwrite_module_params_on_conversion,
        torch.__future__.set_overwrite_module_params_on_conversion,
    ),
    (
        _core.TorchSetting.SWAP_CONVERTED,
        torch.__future__.get_swap_module_params_on_conversion,
        torch.__future__.set_swap_module_params_on_conversion,
    ),
)
#: Settings of threads; a new thread has torch's defaults.
_OF_THREADS: tuple[_Sent, ...] = (
    (_core.TorchSetting.AUTOCAST_CACHE, torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (_core.TorchSetting.BACKWARD_THREADS, torch._C._is_multithreading_enabled, torch._C._set_multithreading_enabled),
    (_core.TorchSetting.VIEW_REPLAY, torch._C._is_view_replay_enabled, torch._C._set_view_replay_enabled),
)
_THREAD_GETTERS = _core.Getters([get for _, get, _ in _OF_THREADS])
#: Objects of this process, which `warnings.catch_warnings` and `contextlib.redirect_stdout` replace.
_OWN: tuple[tuple[_Get, _Set], ...] = (
    (_warning_filters, _set_warning_filters),
    (functools.partial(getattr, sys, "stdout"), lambda value: setattr(sys, "stdout", value)),
    (functools.partial(getattr, sys, "stderr"), lambda value: setattr(sys, "stderr", value)),
)
_SETTINGS = (*((get, set_) for _, get, set_ in _SENT), *_OWN)
_GETTERS = _core.Getters([get for get, _ in _SETTINGS])


def cuda_in_use() -> bool:
    """Return whether this process has begun to use CUDA."""
    return torch.cuda._initialized and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def keep_device_guard() -> None:
    """Allow modules to be compiled in threads that end, if torch was built for CUDA and there is no device.

    Compilation replaces torch's CUDA device guard by an empty one, which belongs to the compiling thread and is freed
    with it (torch 2.11): the next compilation would crash. A guard that the calling thread replaces lives as long as
    that thread.
    """
    exchange = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if exchange is not None and not torch.cuda.is_available():
        exchange()


@functools.cache
def end_forks_at_once() -> None:
    """Let processes forked from this one exit without waiting for threads that they do not have.

    Torch's autograd engine waits for its threads at process exit, for ten seconds if they do not exist.
    """

    def at_fork() -> None:
        atexit.register(os.environ.__setitem__, "TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT", "0")

    os.register_at_fork(after_in_child=at_fork)


def settings() -> Settings:
    """Return the process's current settings."""
    return _GETTERS()


def restore_settings(wanted: Settings) -> None:
    """Restore the process's settings."""
    if not _GETTERS.give(wanted):
        for (_, set_), value, other in zip(_SETTINGS, wanted, settings(), strict=True):
            if value != other:
                set_(value)


@contextmanager
def computing_under(wanted: Settings) -> Iterator[None]:
    """Have the process's settings be these in the block, except for objects such as output streams."""
    now = settings()
    restore_settings((*wanted[: len(_SENT)], *now[len(_SENT) :]))
    try:
        yield
    finally:
        restore_settings(now)


def thread_settings() -> Settings:
    """Return the calling thread's current settings."""
    return _THREAD_GETTERS()


def set_thread(wanted: Settings) -> None:
    """Set the calling thread's settings."""
    if not _THREAD_GETTERS.give(wanted):
        for (_, _, set_), value in zip(_OF_THREADS, wanted, strict=True):
            set_(value)


def difference(before: Settings, thread: Settings) -> list[tuple[_core.TorchSetting, bool | str]]:
    """Return the settings that differ from ``before``, or from ``thread`` for those of threads, without objects."""
    if _GETTERS.give(before) and _THREAD_GETTERS.give(thread):
        return []
    found = [*_different(_SENT, before, settings()), *_different(_OF_THREADS, thread, thread_settings())]
    return [(setting, _summary(new)) for setting, new in found]


def _different(sent: Sequence[_Sent], before: Settings, after: Settings) -> Iterator[tuple[_core.TorchSetting, Any]]:
    for (setting, _, _), old, new in zip(sent, before, after, strict=False):
        if old != new:
            yield setting, new


def _summary(value: Any) -> bool | str:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def change(different: Iterable[tuple[_core.TorchSetting, bool | str]]) -> None:
    """Change some settings of the process, and of the calling thread."""
    told: dict[_core.TorchSetting, Any] = {
        setting: getattr(torch, str(value)) if setting == _core.TorchSetting.DEFAULT_DTYPE else value
        for setting, value in different
    }
    now = settings()
    sent = tuple(told.get(setting, old) for (setting, _, _), old in zip(_SENT, now, strict=False))
    restore_settings((*sent, *now[len(sent) :]))
    own = zip(_OF_THREADS, thread_settings(), strict=True)
    set_thread(tuple(told.get(setting, old) for (setting, _, _), old in own))


def random_state() -> RandomState:
    """Return the states of the default generators in use."""
    generator = torch.default_generator.clone_state()  # cheaper than the state as a tensor
    if not cuda_in_use():
        return generator, {}
    device = torch.cuda.current_device()
    return generator, {device: torch.cuda.get_rng_state(device)}


def restore_random_state(state: RandomState) -> None:
    """Restore the states of the default generators."""
    torch.default_generator.set_state(state[0].get_state())
    for device, one in state[1].items():
        torch.cuda.set_rng_state(one, device)


def seed(seed: int) -> None:
    """Seed the default generators of the CPU and, if CUDA is in use, of the current device.

    Only the generators' states are set, so that the script's own seed is restored with its state.
    """
    torch.default_generator.manual_seed(seed)
    if cuda_in_use():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)
