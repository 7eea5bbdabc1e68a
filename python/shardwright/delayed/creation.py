"""``smp.delay_param_initialization``: modules whose parameters take no memory until they are placed."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from torch import nn

from shardwright.creation import watch_creation
from shardwright.delayed.materialise import materialise
from shardwright.delayed.tensor import DelayedTensor, dispatch
from shardwright.dispatch_mode import DispatchMode
from shardwright.errors import ConfigError

_delays: ContextVar[bool] = ContextVar("shardwright_delays_parameters", default=False)


class _Noting(DispatchMode):  # type: ignore[no-untyped-call]
    """Notes what would make tensors."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not _delays.get():
            return func(*args, **(kwargs or {}))
        return dispatch(func, args, kwargs or {}, creating=True)


@contextlib.contextmanager
def _set_to(delays: bool) -> Iterator[None]:
    token = _delays.set(delays)
    try:
        yield
    finally:
        _delays.reset(token)


@contextlib.contextmanager
def noting() -> Iterator[None]:
    """Make floating-point tensors without values inside; they get them when they are materialised, or when read."""
    with _set_to(True), _Noting():  # type: ignore[no-untyped-call]
        yield


@contextlib.contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Create modules inside whose parameters take no memory until they are placed (paper, appendix I.5).

    How each parameter is initialised is noted, with the state of the random number generator, and done once
    ``smp.DistributedModel`` has divided the model, on the ranks that own the parameter. The numbers are those that
    the module would have without this, and the generators are left as they would be: each random tensor is drawn here,
    one at a time, and given back. Buffers are made at once. Code that reads a parameter before it is placed gets its
    values, made for that one operation; code that writes values of its own to one, such as ``load_state_dict``, gives
    it memory.

    Args:
        enabled: False makes the parameters of what is created inside at once, inside of another such context too.

    Raises:
        ConfigError: ``enabled`` is no bool.
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

    with watch_creation(note), noting():
        yield
    for reference in created:
        module = reference()
        if module is not None:
            _make_buffers(module)


def _make_buffers(module: nn.Module) -> None:
    """Give values to all tensors of a module itself that are no parameters."""
    held = [*module._buffers.values(), *module.__dict__.values()]
    materialise(one for one in held if isinstance(one, DelayedTensor) and not isinstance(one, nn.Parameter))
