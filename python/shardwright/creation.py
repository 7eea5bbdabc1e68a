"""Notification of created modules, for contexts that apply to the modules created inside."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from shardwright.patches import original_of, replaced

CreationObserver = Callable[[nn.Module], None]
T = TypeVar("T")


@functools.wraps(nn.Module.__init__)
def _init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    original_of(_init)(module, *args, **kwargs)
    for each in _WATCH.observers:
        each(module)


class _Watch:
    """Replaces ``nn.Module.__init__`` while any context is open, on whichever thread.

    Attributes:
        observers: How many contexts each is told in.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._replaced = contextlib.ExitStack()
        self.observers: dict[CreationObserver, int] = {}

    def enter(self, observer: CreationObserver) -> None:
        with self._lock:
            if not self.observers:
                self._replaced.enter_context(replaced(nn.Module, {"__init__": _init}))
            self.observers = {**self.observers, observer: self.observers.get(observer, 0) + 1}

    def leave(self, observer: CreationObserver) -> None:
        with self._lock:
            counts = {**self.observers, observer: self.observers[observer] - 1}
            self.observers = {each: count for each, count in counts.items() if count}
            if not self.observers:
                self._replaced.close()


_WATCH = _Watch()


@contextlib.contextmanager
def watch_creation(observer: CreationObserver) -> Iterator[None]:
    """Call a function with each module at the end of ``nn.Module.__init__``, on all threads.

    Subclasses of any kind get there, before their own attributes are set. Copies made by ``copy.deepcopy`` do not: what
    is to go with a module belongs in its ``__dict__``. The function has to find out by itself whether the calling
    thread is in its context.
    """
    _WATCH.enter(observer)
    try:
        yield
    finally:
        _WATCH.leave(observer)


class CreationMark(Generic[T]):
    """An attribute of the modules that are created in a context, on its thread; the innermost context wins."""

    def __init__(self, attribute: str) -> None:
        """Set an attribute of this name, which copies of a module have too."""
        self._attribute = attribute
        self._value: ContextVar[T | None] = ContextVar(attribute, default=None)

    def _set(self, module: nn.Module) -> None:
        if (value := self._value.get()) is not None:
            self.mark(module, value)

    def mark(self, module: nn.Module, value: T) -> None:
        """Set the attribute of a module that is being created."""
        module.__dict__[self._attribute] = value

    @contextlib.contextmanager
    def within(self, value: T) -> Iterator[None]:
        """Give modules created in the block this value."""
        token = self._value.set(value)
        try:
            with watch_creation(self._set):
                yield
        finally:
            self._value.reset(token)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Create floating-point tensors in the block with this dtype; None for the current default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(before if dtype is None else dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
