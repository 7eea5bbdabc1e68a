"""Thread-local state."""

from __future__ import annotations

import threading


class _Thread(threading.local):
    #: The task that it runs; None outside a step, and in the script's own thread.
    task: object | None = None


thread = _Thread()
