"""A faster ``torch.set_grad_enabled`` for hot paths."""

from __future__ import annotations

import torch


class GradMode:
    """Set the grad mode for a block, with half the calls of ``torch.set_grad_enabled``."""

    __slots__ = ("_before", "_mode")

    def __init__(self, mode: bool) -> None:
        """Create the context manager for a block with this mode."""
        self._mode = mode

    def __enter__(self) -> None:
        """Set it."""
        self._before = torch.is_grad_enabled()
        if self._before is not self._mode:
            torch._C._set_grad_enabled(self._mode)

    def __exit__(self, *_: object) -> None:
        """Restore the previous mode."""
        if torch.is_grad_enabled() is not self._before:
            torch._C._set_grad_enabled(self._before)
