"""What modules keep in plain attributes, as it was before a step that may be taken back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

#: What torch keeps in a module's attributes itself; parameters' gradients and buffers are put back elsewhere.
_OF_TORCH = frozenset(vars(nn.Module()))


class ModuleAttributes:
    """The attributes of modules, and what is in their lists, dicts and sets; not what else those refer to."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Remember them."""
        self._before: list[tuple[dict[str, Any], dict[str, Any], list[tuple[Any, Any]]]] = []
        for module in modules:
            attributes = vars(module)
            own = {name: value for name, value in attributes.items() if name not in _OF_TORCH}
            containers = [(value, value.copy()) for value in own.values() if type(value) in (list, dict, set)]
            self._before.append((attributes, own, containers))

    def restore(self) -> None:
        """Put them back."""
        for attributes, own, containers in self._before:
            for name in attributes.keys() - own.keys() - _OF_TORCH:
                del attributes[name]
            attributes.update(own)
            for container, content in containers:
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(content)
