"""Lazy import of ``rich``, which only ranks that print tables need."""

from __future__ import annotations

import random


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
