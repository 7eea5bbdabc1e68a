"""Counts the modules that a rank computes again in backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Recomputed:
    """The number of calls of modules inside the backward pass, from when it is made."""

    def __init__(self) -> None:
        self.calls = 0
        self._handle = nn.modules.module.register_module_forward_hook(self._called)

    def _called(self, *_: Any) -> None:
        self.calls += torch._C._current_graph_task_id() != -1

    def end(self) -> int:
        """Stop counting; return how many there were."""
        self._handle.remove()
        return self.calls
