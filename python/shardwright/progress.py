"""Saying what a start is busy with, where it takes long enough for somebody to wonder."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator

from shardwright.logs import logger

#: What is over sooner is not mentioned.
PATIENCE_SECONDS = 2.0


def _say(text: str) -> None:
    """Where a script has asked for the library's log, it gets the line there."""
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info("%s", text)
    else:
        print(f"shardwright: {text}", file=sys.stderr, flush=True)


class Progress:
    """Tells what rank 0 does, once for each phase that lasts; other ranks wait for it or for the same."""

    def __init__(
        self, rank: int, patience_seconds: float | None = None, say: Callable[[str], None] | None = None
    ) -> None:
        """Nothing is said yet.

        Args:
            rank: The rank that asks. Only rank 0 says anything.
            patience_seconds: After how long; `PATIENCE_SECONDS` by default.
            say: Takes a line; by default it goes to the log, or to the standard error stream.
        """
        self._rank = rank
        self._patience = PATIENCE_SECONDS if patience_seconds is None else patience_seconds
        self._tell = _say if say is None else say

    @contextlib.contextmanager
    def phase(self, what: str) -> Iterator[None]:
        """Say `what` this rank is doing, unless the block is over soon.

        Args:
            what: Such as ``"tracing the model"``.
        """
        if self._rank != 0:
            yield
            return
        timer = threading.Timer(self._patience, self._say_still, [what])
        timer.name, timer.daemon = "shardwright-progress", True
        began = time.perf_counter()
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            logger.debug("rank 0: %s took %.3f s", what, time.perf_counter() - began)

    def _say_still(self, what: str) -> None:
        self._tell(f"rank 0: {what}, for {self._patience:g} s so far")
