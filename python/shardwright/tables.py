"""Lazy import of ``rich``, which only ranks that print tables need."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

#: Of tables that are written to a file.
_LOG_WIDTH = 120


def load_rich() -> None:
    """Import ``rich`` on first use; importing the package does not need it.

    ``rich`` draws from Python's global generator when it is imported, which most ranks do not.
    """
    state = random.getstate()
    try:
        import rich.console
        import rich.table  # noqa: F401
    finally:
        random.setstate(state)


def error_console() -> Console:
    """Return a console on the standard error stream."""
    load_rich()
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        console.width = _LOG_WIDTH
    return console
