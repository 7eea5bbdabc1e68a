"""Ctrl-C in a step: it ends the step where every rank can still take it back, and waits where none could.

Python raises what a signal's handler raises between any two operations of the main thread. In the middle of
bookkeeping, or when other ranks may already know that the step has succeeded, that would leave ranks apart. There the
handler takes a note, and the signal counts as soon as it can.
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
    """Of the main thread, which alone runs handlers."""

    #: Of how many blocks each holds signals back.
    depth = 0
    #: What came meanwhile.
    pending: list[tuple[int, FrameType | None]] = []  # noqa: RUF012
    #: Whose handler stood there before.
    before: dict[int, Handler] = {}  # noqa: RUF012
    #: Told of each signal that counts.
    noticed: Callable[[], None] | None = None


def _handle(number: int, frame: FrameType | None) -> Any:
    if _State.depth and not _State.pending:  # whoever asks twice cannot wait
        _State.pending.append((number, frame))
        return None
    _State.pending.clear()
    return _let_through(number, frame)


def _let_through(number: int, frame: FrameType | None) -> Any:
    if _State.noticed is not None:
        _State.noticed()
    handler = _State.before.get(number)
    return None if handler is None else handler(number, frame)


def install(noticed: Callable[[], None]) -> None:
    """Take signals over, in the main thread.

    Args:
        noticed: Is called at each signal that counts.
    """
    if threading.get_ident() == _main:
        _State.noticed = noticed
        _take_over()


def uninstall() -> None:
    """Give signals back."""
    if threading.get_ident() != _main:
        return
    _State.noticed = None
    for number, handler in _State.before.items():
        if signal.getsignal(number) is _handle:
            signal.signal(number, handler)
    _State.before.clear()


def _take_over() -> None:
    """Stand before the handler that is there; one that ignores signals, or ends the process, stays."""
    handler = _handler_of(_SIGINT)
    if handler is not _handle and callable(handler):
        _State.before[signal.SIGINT] = handler
        signal.signal(signal.SIGINT, _handle)


class HeldBack:
    """A block in which signals wait for its end; a second one does not wait."""

    __slots__ = ("_before", "_is_main")

    def __enter__(self) -> None:
        """Hold signals back."""
        self._is_main = threading.get_ident() == _main
        if self._is_main:
            self._before = _State.depth
            _State.depth = self._before + 1

    def __exit__(self, *_: object) -> None:
        """Let through what came, where no other block holds it back."""
        if self._is_main:
            _State.depth = self._before
            if not self._before:
                let_pending_through()


class InterruptibleStep(HeldBack):
    """A step: signals are held back, but in its blocks :class:`LetThrough`."""

    __slots__ = ()

    def __enter__(self) -> None:
        """The step begins."""
        super().__enter__()
        if self._is_main and _State.noticed is not None:
            _take_over()


class LetThrough:
    """A block within a :class:`InterruptibleStep` in which signals are handled as they come."""

    __slots__ = ("_depth",)

    def __enter__(self) -> None:
        """Let through what came, and what comes."""
        self._depth = 0
        if threading.get_ident() == _main:
            let_pending_through()  # what it raises is raised within the step still
            self._depth = _State.depth
            _State.depth = 0
            if _State.pending:  # of that very moment
                _State.depth = self._depth
                let_pending_through()
                _State.depth = 0

    def __exit__(self, *_: object) -> None:
        """The step goes on."""
        if self._depth:
            _State.depth = self._depth


def let_pending_through() -> None:
    """Handle what has come and was held back."""
    while _State.pending:
        _let_through(*_State.pending.pop())
