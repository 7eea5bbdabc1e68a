"""What the command ``shardwright`` does before all else is imported, which takes seconds: Ctrl-C then says one line.

It is imported first by the package. In every other process it does nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

INTERRUPTED = 130
_MODULES = (["-m", "shardwright"], ["-m", "shardwright.command"])


def _is_command() -> bool:
    """Return whether this process was started as the command."""
    if os.path.basename(sys.argv[0] if sys.argv else "") == "shardwright":
        return True
    # While the package of `python -m` is imported, its name is known from the original arguments only.
    if sys.argv[:1] != ["-m"]:
        return False
    given = sys.orig_argv
    return given[given.index("-m") :][:2] in _MODULES if "-m" in given else False


def _end(_number: int, _frame: FrameType | None) -> None:
    os.write(2, b"shardwright: interrupted\n")
    os._exit(INTERRUPTED)


def take_interrupts() -> None:
    """Let Ctrl-C end the command with one line, unless the process ignores it or handles it otherwise."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def leave_interrupts() -> None:
    """All is imported: let Ctrl-C raise again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


take_interrupts()
