"""``smp.delay_param_initialization``: modules whose parameters take no memory until they are placed."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from shardwright.creation import watch_creation
from shardwright.delayed.materialise import materialise
from shardwright.delayed.reading import reading_delayed
from shardwright.delayed.tensor import DelayedTensor, dispatch
from shardwright.dispatch_mode import DispatchMode
from shardwright.errors import ConfigError

_delays: ContextVar[bool] = ContextVar("shardwright_delays_parameters", default=False)


class _Noting(DispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations that create tensors."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not _delays.get() or _on_meta(kwargs):
            return func(*args, **(kwargs or {}))
        return dispatch(func, args, kwargs or {}, creating=True)


def _on_meta(kwargs: dict[str, Any] | None) -> bool:
    """Return whether an operator makes something on the meta device, which takes no memory and never has values."""
    device = None if kwargs is None else kwargs.get("device")
    return device is not None and torch.device(device).type == "meta"


@contextlib.contextmanager
def _set_to(delays: bool) -> Iterator[None]:
    token = _delays.set(delays)
    try:
        yield
    finally:
        _delays.reset(token)


@contextlib.contextmanager
def noting() -> Iterator[None]:
    """Create floating-point tensors without values; they get values when materialized or read."""
    with _set_to(True), _Noting():  # type: ignore[no-untyped-call]
        yield


@contextlib.contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Create modules whose parameters take no memory until they are placed (paper, appendix I.5).

    The operations that initialize each parameter are recorded with the state of the random number generator. They are
    run when ``smp.DistributedModel`` has partitioned the model, on the ranks that own the parameter. The values, and
    the state of the generators afterwards, are the same as without this context: random tensors are also drawn during
    creation, one at a time, and freed. Weights that ``from_pretrained`` of ``transformers`` loads from files of
    safetensors are read, and quantized if it is told so, by the ranks that own them. Buffers are created immediately.
    Code that reads a parameter before it is placed gets its values, computed for this one operation. Code that writes
    other values to a parameter, such as ``load_state_dict``, allocates its memory.

    Args:
        enabled: With False, parameters are created immediately, also inside another such context.
    """
    if not isinstance(enabled, bool):
        raise ConfigError(f"smp.delay_param_initialization: enabled is {enabled!r}; allowed: True and False")
    if not enabled:
        with _set_to(False):
            yield
        return
    created: list[weakref.ref[nn.Module]] = []

    def note(module: nn.Module) -> None:
        if _delays.get():
            created.append(weakref.ref(module))

    with watch_creation(note), noting(), reading_delayed():
        yield
    for reference in created:
        module = reference()
        if module is not None:
            _make_buffers(module)


def _make_buffers(module: nn.Module) -> None:
    """Materialize the tensors of a module itself that are not parameters."""
    held = [*module._buffers.values(), *module.__dict__.values()]
    materialise(one for one in held if isinstance(one, DelayedTensor) and not isinstance(one, nn.Parameter))
