"""Forwards attributes that are set on ``smp.DistributedModel`` to the wrapped module, whose forward reads them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

#: Names that the wrapper and the module both have, and that are set on both.
_BOTH = ("training",)


class ForwardsAttributes(nn.Module):
    """Forwards attributes, buffers, parameters and modules that are set on it to ``module``.

    The wrapper's own names are those that its class defines and those that it has when :meth:`_keep_own` is called.
    """

    module: nn.Module
    _passes_on: bool
    _own_names: frozenset[str] | None = None

    def _keep_own(self) -> None:
        """Forward from now on all names that the wrapper does not have."""
        self._own_names = frozenset((*vars(self), *self._modules))

    def _is_own(self, name: str) -> bool:
        own = self._own_names
        return own is None or name in own or hasattr(type(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the wrapped module, or of the wrapper if the name is its own."""
        if not self._is_own(name):
            setattr(self._modules["module"], name, value)
            return
        super().__setattr__(name, value)
        if self._own_names is None:
            return
        if name == "forward":
            self._passes_on = False  # the assigned forward must be called, not only the module's
        if name in _BOTH:
            setattr(self._modules["module"], name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute of the wrapped module, or of the wrapper if the name is its own."""
        if name in vars(self) or self._is_own(name):
            super().__delattr__(name)
        else:
            delattr(self._modules["module"], name)

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        """Register a buffer of the wrapped module."""
        self.module.register_buffer(name, tensor, persistent)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter of the wrapped module."""
        self.module.register_parameter(name, param)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a child to the wrapped module."""
        self.module.add_module(name, module)
