"""What forwards keep in attributes for later in the same microbatch, while tasks of several microbatches take turns."""

from __future__ import annotations

from typing import Any

from torch import nn

_ABSENT = object()


class Attributes:
    """Gives each microbatch its own values of the attributes that forwards set before they read them.

    Without it, a module that sets ``self.mask``, calls a module on another rank and then reads ``self.mask`` would get
    another microbatch's, whose forward ran on this rank meanwhile.
    """

    def __init__(self) -> None:
        """Start without attributes."""
        self._places: list[tuple[dict[str, Any], str]] = []
        self._kept: dict[int, list[Any]] = {}
        self._microbatch: int | None = None

    def add(self, module: nn.Module, name: str) -> None:
        """Keep this attribute of `module` for each microbatch."""
        self._places.append((module.__dict__, name))

    def enter(self, microbatch: int) -> None:
        """A task of this microbatch gets the turn."""
        if microbatch == self._microbatch:
            return
        if self._places:
            if self._microbatch is not None:
                self._kept[self._microbatch] = [values.get(name, _ABSENT) for values, name in self._places]
            self._put_back(self._kept.pop(microbatch, []))
        self._microbatch = microbatch

    def end_step(self) -> None:
        """Leave what the last microbatch set, as if one had run after the other."""
        if self._kept and self._microbatch is not None and max(self._kept) > self._microbatch:
            self._put_back(self._kept[max(self._kept)])
        self._kept.clear()
        self._microbatch = None

    def _put_back(self, kept: list[Any]) -> None:
        # The model may have been divided, and attributes added, since they were kept.
        for (values, name), value in zip(self._places, kept, strict=False):
            if value is not _ABSENT:
                values[name] = value
            else:
                values.pop(name, None)
