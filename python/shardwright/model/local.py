"""Iterators over the modules, parameters and buffers that a rank holds of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardwright.model.sentinel import is_sentinel

if TYPE_CHECKING:
    from shardwright.model.placement import Placement


class LocalTensors:
    """Iterates over what this rank holds of ``module``. Other tensors are sentinels."""

    module: nn.Module
    placement: Placement

    def settle(self) -> None:
        """Give the model the values of a load that waits for the first step, before they are read or changed."""

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return an iterator over this rank's parameters with their names, each once, in the model's order."""
        self.settle()
        return ((name, p) for name, p in self.module.named_parameters() if not is_sentinel(p))

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """Return an iterator over the parameters that this rank owns, each once, in the model's order."""
        return (parameter for _, parameter in self.local_named_parameters())

    def local_named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return an iterator over this rank's buffers with their names, each once, in the model's order."""
        self.settle()
        return ((name, b) for name, b in self.module.named_buffers() if not is_sentinel(b))

    def local_buffers(self) -> Iterator[torch.Tensor]:
        """Return an iterator over the buffers that this rank holds, each once, in the model's order."""
        return (buffer for _, buffer in self.local_named_buffers())

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Return an iterator over the modules that this rank runs, with their names."""
        self.settle()
        return self.placement.local_named_modules()

    def local_modules(self) -> Iterator[nn.Module]:
        """Return an iterator over the modules that this rank runs, each once, in the model's order."""
        return (module for _, module in self.local_named_modules())
