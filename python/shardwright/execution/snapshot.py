"""Snapshots of the state of modules, to undo a failed step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from shardwright.contents import INTERNAL, attributes_of, cells_of, put_attributes, put_values, restore_cells
from shardwright.execution.children import Members
from shardwright.execution.kept import Attribute, version_of

_MISSING = object()


class Snapshot:
    """A snapshot of the state of modules, with copies of tensors. Buffers are restored elsewhere."""

    def __init__(
        self, modules: Iterable[nn.Module], variables: Iterable[Attribute], parameters: Iterable[nn.Parameter]
    ) -> None:
        """Remember it."""
        self._attributes = [
            (module, {name: value for name, value in attributes_of(module).items() if name not in INTERNAL})
            for module in modules
        ]
        self._members = [Members(module) for module in modules]
        self._homes = [home.__dict__ for home in {id(home): home for home, _ in variables}.values()]
        self._variables = [(home.__dict__, name, home.__dict__.get(name, _MISSING)) for home, name in variables]
        self._tensors: list[tuple[torch.Tensor, int, torch.Tensor]] = []
        for parameter in parameters:
            self._tensors.append((parameter, -1, parameter.detach().clone()))  # `parameter.data` has its own version
        values = [value for _, own in self._attributes for value in own.values()]
        self._cells, tensors = cells_of([*values, *(value for _, _, value in self._variables)])
        for part in tensors:
            if part.layout is torch.strided:
                self._tensors.append((part, version_of(part), part.detach().clone()))

    def restore(self) -> None:
        """Put it back."""
        for module, own in self._attributes:
            put_attributes(module, own, INTERNAL)
        for members in self._members:
            members.restore()
        for variables, name, value in self._variables:
            if value is _MISSING:
                variables.pop(name, None)
            else:
                variables[name] = value
        restore_cells(self._cells, [*(vars(module) for module, _ in self._attributes), *self._homes])
        for tensor, version, copy in self._tensors:
            # One that is written to past its version has the same.
            if version_of(tensor) != version or tensor.is_inference() or not torch.equal(tensor, copy):
                put_values(tensor, copy)
