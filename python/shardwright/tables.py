"""The library ``rich``, which only ranks that print something need."""

from __future__ import annotations

import random


def load_rich() -> None:
    """Import what tables need, before an import of it elsewhere: an import of the package does without.

    ``rich`` draws from Python's global generator when it is imported, which most ranks do not.
    """
    state = random.getstate()
    try:
        import rich.console
        import rich.table  # noqa: F401
    finally:
        random.setstate(state)
