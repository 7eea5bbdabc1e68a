"""Reports an exception or signal that ends the script to the other ranks."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from types import FrameType, TracebackType

from shardwright.failure_text import FailureText
from shardwright.job.runtime import Runtime


@functools.cache
def _spare_forks() -> None:
    """Let a process that is forked from a rank end by SIGTERM as it would without the rank's handler.

    The signal is blocked meanwhile: Python forgets what has come to a child before it runs any handler.
    """
    kept = threading.local()

    def before() -> None:
        kept.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def after() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, kept.mask)

    def in_child() -> None:
        if isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), ExitHandlers):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=in_child)


class ExitHandlers:
    """The exception hook and the signal handler of a rank.

    A script may put its own in front, which then call these for as long as the process lives: once the rank has left
    its job they know nothing of it, and do what was done before them.
    """

    def __init__(self, runtime: Runtime) -> None:
        """Install the handlers."""
        self._runtime: Runtime | None = runtime
        self._previous = sys.excepthook
        sys.excepthook = self._on_exception
        is_main = threading.current_thread() is threading.main_thread()
        self._handles_termination = is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        if self._handles_termination:
            signal.signal(signal.SIGTERM, self._on_termination)
            _spare_forks()

    def restore(self) -> None:
        """Restore the previous handlers, unless they have been replaced since."""
        self._runtime = None
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._previous
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and self._handles_termination and signal.getsignal(signal.SIGTERM) == self._on_termination:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Record the error for the other ranks; print one line instead of a traceback for Ctrl-C."""
        runtime = self._here()
        if runtime is not None and issubclass(kind, KeyboardInterrupt):
            sys.stderr.write(f"shardwright: rank {runtime.place.rank} was interrupted\n")
            return
        if runtime is not None:
            runtime.script_error = FailureText.of(error)._asdict()
        self._previous(kind, error, trace)

    def _on_termination(self, number: int, _frame: FrameType | None) -> None:
        runtime = self._here()
        if runtime is not None:
            sys.stderr.write(f"shardwright: rank {runtime.place.rank} was terminated\n")
        elif self._runtime is not None:  # a forked process ends as it would have without the rank's handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        sys.exit(128 + number)

    def _here(self) -> Runtime | None:
        """Return the runtime, unless this process has left the job or is forked from the rank."""
        return self._runtime if self._runtime is not None and self._runtime.pid == os.getpid() else None
