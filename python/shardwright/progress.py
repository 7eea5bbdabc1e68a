"""Progress messages for phases of a start that take long."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator

from shardwright.logs import logger

#: Phases that end sooner are not reported.
DELAY_SECONDS = 2.0


def _say(text: str) -> None:
    """Log the line if the script has enabled the library's log, else print it."""
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info("%s", text)
    else:
        print(f"shardwright: {text}", file=sys.stderr, flush=True)


class Progress:
    """Reports long phases on rank 0, once each."""

    def __init__(self, rank: int, delay_seconds: float | None = None, say: Callable[[str], None] | None = None) -> None:
        """Create the reporter of a rank; only rank 0 reports.

        `say` takes a line; by default it goes to the log, or to the standard error stream.
        """
        self._rank = rank
        self._delay_seconds = DELAY_SECONDS if delay_seconds is None else delay_seconds
        self._report = _say if say is None else say

    def say(self, text: str) -> None:
        """Report a line, on rank 0."""
        if self._rank == 0:
            self._report(f"rank 0: {text}")

    @contextlib.contextmanager
    def phase(self, what: str) -> Iterator[None]:
        """Report a phase, such as ``"tracing the model"``, if the block takes longer than the delay."""
        if self._rank != 0:
            yield
            return
        timer = threading.Timer(self._delay_seconds, self._say_still, [what])
        timer.name, timer.daemon = "shardwright-progress", True
        began = time.perf_counter()
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            logger.debug("rank 0: %s took %.3f s", what, time.perf_counter() - began)

    def _say_still(self, what: str) -> None:
        self.say(f"{what}, for {self._delay_seconds:g} s so far")
