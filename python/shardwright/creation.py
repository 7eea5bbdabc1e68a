"""Seeing modules as they are created, for contexts that say something of what is built inside them."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

CreationObserver = Callable[[nn.Module], None]


class _Watch:
    """Replaces ``nn.Module.__init__`` while any context is open, on whichever thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[CreationObserver, int] = {}
        self._original: Any = None

    def enter(self, observer: CreationObserver) -> None:
        with self._lock:
            first = not self._open
            self._open = {**self._open, observer: self._open.get(observer, 0) + 1}
            if not first:
                return
            original = self._original = nn.Module.__init__

            @functools.wraps(original)
            def __init__(module: nn.Module, *args: Any, **kwargs: Any) -> None:
                original(module, *args, **kwargs)
                for each in self._open:
                    each(module)

            setattr(nn.Module, "__init__", __init__)  # noqa: B010

    def leave(self, observer: CreationObserver) -> None:
        with self._lock:
            counts = {**self._open, observer: self._open[observer] - 1}
            self._open = {each: count for each, count in counts.items() if count}
            if not self._open:
                setattr(nn.Module, "__init__", self._original)  # noqa: B010


_WATCH = _Watch()


@contextlib.contextmanager
def watch_creation(observer: CreationObserver) -> Iterator[None]:
    """Show every module to a function at the end of its ``nn.Module.__init__``, on all threads while this is open.

    Subclasses of any kind get there, before their own attributes are set. Copies made by ``copy.deepcopy`` do not: what
    is to go with a module belongs in its ``__dict__``.

    Args:
        observer: Takes the module; it has to find out by itself whether the calling thread is in its context.
    """
    _WATCH.enter(observer)
    try:
        yield
    finally:
        _WATCH.leave(observer)
