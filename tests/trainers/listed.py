"""Checks that every rank of a job runs; the last line of its output says how many."""

from __future__ import annotations

import json
from collections.abc import Callable


class Checks:
    """They run in the order in which they were added."""

    def __init__(self) -> None:
        """None yet."""
        self._all: list[Callable[[], None]] = []

    def add(self, function: Callable[[], None]) -> Callable[[], None]:
        """Add a check."""
        self._all.append(function)
        return function

    def run(self, rank: int) -> None:
        """Run all on a rank; the first that fails ends it, with its name."""
        for function in self._all:
            try:
                function()
            except BaseException as error:
                error.add_note(f"in {function.__name__} on rank {rank}")
                raise
        print(json.dumps({"checks": len(self._all)}))
