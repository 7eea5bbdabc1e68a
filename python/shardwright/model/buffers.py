"""What the buffers of a model hold before a step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from shardwright.contents import put_values, restore_dict
from shardwright.model.sentinel import is_sentinel


class SavedBuffers:
    """The buffers of a model on one rank as they were before a step, which puts them back if it fails.

    The first step of a pipeline divides the model meanwhile: its buffers are loaded, moved to a device and equalized
    over replicas then. They are saved again after that, or a step that fails, or is run again, would undo it.
    """

    def __init__(self) -> None:
        """Have saved nothing."""
        self._saved: list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]] = []
        self._modules: list[nn.Module] = []
        #: By module, its table of buffers, those that are None too, and the names of those that are not saved.
        self._tables: list[dict[str, torch.Tensor | None]] = []
        self._names: list[set[str] | None] = []

    def save(self, buffers: Iterable[tuple[nn.Module, str]], modules: Iterable[nn.Module] = ()) -> None:
        """Copy them, in the place of what was saved before.

        Args:
            buffers: The module and name of each that a step may change here.
            modules: Modules that have the same names, and None under the same of them, when buffers are put back.
        """
        self._modules = list(modules)
        self._tables = [dict(module._buffers) for module in self._modules]
        sets = (module._non_persistent_buffers_set for module in self._modules)
        self._names = [set(names) if names else None for names in sets]
        found = ((module, name, module._buffers[name]) for module, name in buffers)
        self._saved = [(module, name, one, one.clone()) for module, name, one in found if one is not None]

    def put_back(self) -> None:
        """Give the buffers the values that they had."""
        for module, table, names in zip(self._modules, self._tables, self._names, strict=True):
            restore_dict(module._buffers, table)
            if names or module._non_persistent_buffers_set:
                module._non_persistent_buffers_set = set(names or ())
        with torch.no_grad():
            for module, name, buffer, copy in self._saved:
                now = module._buffers.get(name)
                if now is None or not is_sentinel(now):  # a partition made in this step may have released it
                    put_values(buffer, copy)
                    module._buffers[name] = buffer
        self.forget()

    def forget(self) -> None:
        """Free the copies."""
        self._saved, self._modules, self._tables, self._names = [], [], [], []
