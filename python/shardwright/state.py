"""``smp.state``: read-only state of the library."""

from __future__ import annotations

from typing import Any

from shardwright.job.runtime import current_runtime


class State:
    """Read-only state of the library. Its attributes raise ``ShardwrightError`` before ``smp.init``."""

    @property
    def cfg(self) -> Any:
        """The effective configuration, one attribute for each key."""
        return current_runtime().place.cfg

    @property
    def step(self) -> int:
        """The number of the current or last step, counted from 1."""
        return current_runtime().step.of_training


state = State()
