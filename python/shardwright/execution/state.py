"""Whether an execution of a module changes what the module keeps, so that the order of executions matters."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn


class ModuleState:
    """What a module and its children keep: attributes, what is in their containers, and buffers."""

    def __init__(self, module: nn.Module) -> None:
        """Remember it, without keeping copies of tensors."""
        self._module = module
        self._before = _kept(module)

    def changed(self) -> bool:
        """Whether anything is other than it was."""
        before, now = self._before, _kept(self._module)
        if len(now) != len(before):
            return True
        if all(map(operator.is_, now, before)):
            return False
        pairs = zip(now, before, strict=True)
        return any(a is not b and not (type(a) is int and type(b) is int and a == b) for a, b in pairs)


def _kept(module: nn.Module) -> list[Any]:
    kept: list[Any] = []
    parts, seen = [module], {module}
    for part in parts:  # grows; module.modules() costs several times as much, and this runs at every request
        values = part.__dict__.values()
        kept += values
        for value in values:
            if type(value) in _CONTAINERS and value:
                kept += value.values() if type(value) is dict else value
        for buffer in part._buffers.values():
            if isinstance(buffer, torch.Tensor):
                kept.append(0 if buffer.is_inference() else buffer._version)
        for child in part._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                parts.append(child)
    return kept


_CONTAINERS = frozenset((list, set, dict))
