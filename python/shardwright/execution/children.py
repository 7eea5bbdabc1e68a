"""What modules hold under a name, children included: read, put back, and noticed when it changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from shardwright.contents import restore_dict
from shardwright.patches import original_of

Note = Callable[[nn.Module, str], None]
MISSING: Any = object()


def value_of(holder: Any, name: str) -> Any:
    """What an object holds under a name."""
    if name == "__class__":
        return type(holder)
    if isinstance(holder, nn.Module):
        for held in (holder._buffers, holder._parameters, holder._modules):
            if name in held:
                return held[name]
    return vars(holder).get(name, MISSING)


def set_value(module: nn.Module, name: str, value: Any) -> None:
    """Have a module hold this under a name, other than a parameter, or nothing if it is `MISSING`."""
    if name == "__class__":
        object.__setattr__(module, name, value)
        return
    is_child = isinstance(value, nn.Module) or (value is None and name in module._modules)
    home: dict[str, Any] = module._modules if is_child else module._buffers if name in module._buffers else vars(module)
    for held in (vars(module), module._modules):
        if held is not home:
            held.pop(name, None)
    if value is MISSING:
        home.pop(name, None)
    else:
        home[name] = value


class Children:
    """The children of a module, to be put back."""

    __slots__ = ("_before", "_held", "_module")

    def __init__(self, module: nn.Module) -> None:
        """Remember them."""
        self._module, self._held, self._before = module, module._modules, dict(module._modules)

    def restore(self) -> None:
        """Put them back, in their order."""
        vars(self._module)["_modules"] = self._held
        restore_dict(self._held, self._before)


def exchanged(now: Mapping[str, nn.Module | None], before: Mapping[str, nn.Module | None]) -> list[str]:
    """The names of children that are others than before, are new, or are gone."""
    names = {**before, **now}
    return [name for name in names if now.get(name, MISSING) is not before.get(name, MISSING)]


#: The methods of torch's containers that change children without ``nn.Module.__setattr__``.
CONTAINER_METHODS: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.ModuleDict, "__delitem__"),
    (nn.ModuleDict, "clear"),
    (nn.ModuleList, "insert"),
    (nn.Sequential, "insert"),
)


def telling(note: Note) -> Callable[..., Any]:
    """What stands in the place of one of them, and tells `note` of each child that may be another one afterwards."""

    def change(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for name in [*module._modules, str(len(module._modules))]:
            note(module, name)
        return original_of(change)(module, *args, **kwargs)

    return change
