"""Counts what a rank computes again in backward."""

from __future__ import annotations

from typing import Any

from shardwright.activation_checkpointing import recompute


class Recomputed:
    """The number of second computations of checkpointed modules, from when it is made."""

    def __init__(self) -> None:
        self.number = 0
        self._original: Any = recompute.isolated
        recompute.isolated = self._counted

    def _counted(self, state: Any) -> Any:
        self.number += 1
        return self._original(state)

    def end(self) -> int:
        """Stop counting; return how many there were."""
        recompute.isolated = self._original
        return self.number
