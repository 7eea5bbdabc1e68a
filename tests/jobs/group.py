"""The ranks of a job as one: they run until all have ended, and one that fails ends the others."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from .ranks import forked_ranks

_POLL_SECONDS = 0.02


class Group:
    """Forked ranks, with what of ``subprocess.Popen`` a job's owner needs.

    Attributes:
        grace: In how many seconds the others may end by themselves once one has failed.
    """

    def __init__(
        self,
        command: Iterable[str | Path],
        ranks: int,
        *,
        output: int | IO[Any],
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the ranks.

        Args:
            command: A script, or ``-m`` and a module, and its arguments.
            ranks: How many processes run it.
            output: Where all of them write what they say, errors as well.
            folder: Where they run.
            environment: What each finds in its environment besides the launcher's variables.
        """
        self._ranks = forked_ranks(
            command, ranks, folder=folder, environment=environment, stdout=output, stderr=subprocess.STDOUT
        )
        self.grace = 10.0
        #: The first exit code that was not 0, and when it was seen.
        self._failed: tuple[int, float] | None = None

    def poll(self) -> int | None:
        """None while a rank runs, then the exit code of the first that failed, else 0."""
        codes = [rank.poll() for rank in self._ranks]
        if self._failed is None and any(codes):
            self._failed = next(filter(None, codes)), time.monotonic()
        if self._failed is not None and time.monotonic() - self._failed[1] > self.grace:
            self.kill()
        if None in codes:
            return None
        return 0 if self._failed is None else self._failed[0]

    def wait(self, timeout: float) -> int:
        """Wait for the end of all.

        Raises:
            subprocess.TimeoutExpired: One still runs.
        """
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("the ranks of a job", timeout)
            time.sleep(_POLL_SECONDS)
        return code

    def terminate(self) -> None:
        """Send all of them SIGTERM."""
        for rank in self._ranks:
            rank.terminate()

    def kill(self) -> None:
        """Send all of them SIGKILL."""
        for rank in self._ranks:
            rank.kill()
