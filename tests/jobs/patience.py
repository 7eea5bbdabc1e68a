"""How long tests wait on a machine that may have other things to do.

A test's verdict is what happened. A time only ends what hangs; where a test does ask for seconds, they are those of an
idle machine, and as many times more as this one is slower when they have passed.
"""

from __future__ import annotations

import os
import time

#: What says how many times as long as on an idle machine all may take, where a run of tests makes a load itself.
SLOWER = "SHARDWRIGHT_TESTS_SLOWER"
#: Ends what hangs.
HANG_SECONDS = 600.0 * float(os.environ.get(SLOWER, "1"))
_SAMPLE_SECONDS = 0.02


def slowdown() -> float:
    """How many times as long as on an idle machine work takes now, by processor time and by what waits for one."""
    began, end = time.perf_counter(), time.thread_time() + _SAMPLE_SECONDS
    while time.thread_time() < end:
        pass
    measured = (time.perf_counter() - began) / _SAMPLE_SECONDS
    return max(1.0, measured, os.getloadavg()[0] / (os.cpu_count() or 1))


class Patience:
    """Seconds of an idle machine, from now on."""

    def __init__(self, seconds: float) -> None:
        """Begin."""
        self._seconds, self._began = seconds, time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether they have passed here."""
        passed = time.monotonic() - self._began
        return passed > self._seconds and passed > self._seconds * slowdown()

    def __str__(self) -> str:
        """For errors."""
        return f"{time.monotonic() - self._began:.1f} s (allowed were {self._seconds:g} s of an idle machine)"
