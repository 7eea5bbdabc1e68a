"""What modules keep in plain attributes, as it was before a step that may be taken back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from shardwright.contents import attributes_of, put_attributes

#: What torch keeps in a module's attributes itself; parameters' gradients and buffers are put back elsewhere.
_OF_TORCH = frozenset(vars(nn.Module()))


class ModuleAttributes:
    """The attributes of modules, and what is in their lists, dicts and sets; not what else those refer to."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Remember them."""
        self._before: list[tuple[nn.Module, dict[str, Any], list[tuple[Any, Any]]]] = []
        for module in modules:
            own = {name: value for name, value in attributes_of(module).items() if name not in _OF_TORCH}
            containers = [(value, value.copy()) for value in own.values() if type(value) in (list, dict, set)]
            self._before.append((module, own, containers))

    def restore(self) -> None:
        """Put them back."""
        for module, own, containers in self._before:
            put_attributes(module, own, _OF_TORCH)
            for container, content in containers:
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(content)
