"""Signals in a step: they end the step while all ranks can still undo it, and are deferred otherwise.

A signal handler may raise between any two operations of the main thread. During bookkeeping, or when other ranks may
already know that the step has succeeded, this would leave ranks in different states. There the signal is recorded and
delivered later.
"""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]

_main = threading.main_thread().ident
_SIGINT = int(signal.SIGINT)
#: The handler as it was given; ``signal.getsignal`` looks for it among constants first, which every step would pay for.
_handler_of: Callable[[int], Any] = importlib.import_module("_signal").getsignal


class _State:
    """State of the main thread, the only one that runs handlers."""

    #: The number of open blocks that defer signals.
    depth = 0
    #: Deferred signals.
    pending: list[tuple[int, FrameType | None]] = []  # noqa: RUF012
    #: The previous handlers.
    before: dict[int, Handler] = {}  # noqa: RUF012
    #: Called for each delivered signal.
    on_signal: Callable[[], None] | None = None


def _handle(number: int, frame: FrameType | None) -> Any:
    if _State.depth and not _State.pending:  # a second signal is delivered at once
        _State.pending.append((number, frame))
        return None
    _State.pending.clear()
    return _deliver(number, frame)


def _deliver(number: int, frame: FrameType | None) -> Any:
    if _State.on_signal is not None:
        _State.on_signal()
    handler = _State.before.get(number)
    return None if handler is None else handler(number, frame)


def install(on_signal: Callable[[], None]) -> None:
    """Install the signal handlers, in the main thread; `on_signal` is called for each delivered signal."""
    if threading.get_ident() == _main:
        _State.on_signal = on_signal
        _take_over()


def uninstall() -> None:
    """Restore the previous signal handlers."""
    if threading.get_ident() != _main:
        return
    _State.on_signal = None
    for number, handler in _State.before.items():
        if signal.getsignal(number) is _handle:
            signal.signal(number, handler)
    _State.before.clear()


def _take_over() -> None:
    """Replace the current handler, unless it is one that ignores signals or ends the process."""
    handler = _handler_of(_SIGINT)
    if handler is not _handle and callable(handler):
        _State.before[signal.SIGINT] = handler
        signal.signal(signal.SIGINT, _handle)


class DeferSignals:
    """A block in which signals are deferred to its end; a second signal is delivered at once."""

    __slots__ = ("_before", "_is_main")

    def __enter__(self) -> None:
        """Begin to defer signals."""
        self._is_main = threading.get_ident() == _main
        if self._is_main:
            self._before = _State.depth
            _State.depth = self._before + 1

    def __exit__(self, *_: object) -> None:
        """Deliver deferred signals, unless an outer block defers them too."""
        if self._is_main:
            _State.depth = self._before
            if not self._before:
                deliver_pending()


class InterruptibleStep(DeferSignals):
    """A step: signals are held back, but in its blocks :class:`DeliverSignals`."""

    __slots__ = ()

    def __enter__(self) -> None:
        """The step begins."""
        super().__enter__()
        if self._is_main and _State.on_signal is not None:
            _take_over()


class DeliverSignals:
    """A block within a :class:`InterruptibleStep` in which signals are handled as they come."""

    __slots__ = ("_depth",)

    def __enter__(self) -> None:
        """Deliver deferred signals, and stop deferring."""
        self._depth = 0
        if threading.get_ident() == _main:
            deliver_pending()  # an exception is raised inside the step
            self._depth = _State.depth
            _State.depth = 0
            if _State.pending:  # arrived just now
                _State.depth = self._depth
                deliver_pending()
                _State.depth = 0

    def __exit__(self, *_: object) -> None:
        """Defer signals again."""
        if self._depth:
            _State.depth = self._depth


def deliver_pending() -> None:
    """Deliver deferred signals."""
    while _State.pending:
        _deliver(*_State.pending.pop())
