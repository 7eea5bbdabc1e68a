"""Notification of created modules, for contexts that apply to the modules created inside."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from shardwright.patches import original_of, replaced

CreationObserver = Callable[[nn.Module], None]


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
