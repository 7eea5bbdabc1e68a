"""What ``generate`` of a model sets on it for as long as it runs, where several microbatches generate at a time.

``peft`` puts its own function before that of the model it adapts, and takes it away at the end; another microbatch that
still generates needs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from shardwright.execution.locations import OF_GENERATION


class Generating:
    """The generations of a model that run now."""

    def __init__(self) -> None:
        """None run."""
        self._count = 0
        self._meanwhile: list[tuple[dict[str, Any], dict[str, Any]]] = []

    @contextmanager
    def running(self, module: nn.Module) -> Iterator[None]:
        """Run a generation of a model in the block. Nothing else runs while it begins and ends."""
        if self._count:
            own = [vars(part) for part in module.modules()]
            set_there = [(each, {name: each[name] for name in OF_GENERATION if name in each}) for each in own]
            self._meanwhile = [(each, names) for each, names in set_there if names]
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            for each, names in self._meanwhile if self._count else ():
                each.update(names)
