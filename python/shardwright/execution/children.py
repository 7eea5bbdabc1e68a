"""Read, restore and compare what modules hold under a name: attributes, children and buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from shardwright.contents import restore_dict, slots_of
from shardwright.patches import original_of

Note = Callable[[nn.Module, str], None]
MISSING: Any = object()


def value_of(holder: Any, name: str) -> Any:
    """Return the attribute of an object."""
    if name == "__class__":
        return type(holder)
    if isinstance(holder, nn.Module):
        for held in (holder._buffers, holder._parameters, holder._modules):
            if name in held:
                return held[name]
    return _own(holder, name)


def _own(holder: Any, name: str) -> Any:
    slot = slots_of(type(holder)).get(name)
    if slot is None:
        return vars(holder).get(name, MISSING)
    try:
        return slot.__get__(holder)
    except AttributeError:
        return MISSING


def own_value(module: nn.Module, name: str) -> Any:
    """Return what a module's instance holds under a name, a child or another value; `MISSING` if it holds nothing."""
    return type(module) if name == "__class__" else _own(module, name)


def set_own(module: nn.Module, name: str, value: Any) -> None:
    """Set it to a value returned by :func:`own_value`."""
    if name == "__class__":
        object.__setattr__(module, name, value)
    elif (slot := slots_of(type(module)).get(name)) is not None:
        if value is not MISSING:
            slot.__set__(module, value)
        elif _own(module, name) is not MISSING:
            slot.__delete__(module)
    elif value is MISSING:
        vars(module).pop(name, None)
    else:
        vars(module)[name] = value


class Members:
    """The children and buffers of a module, to restore them later."""

    __slots__ = ("_module", "_not_saved", "_tables")

    def __init__(self, module: nn.Module) -> None:
        """Record them."""
        self._module, self._not_saved = module, set(module._non_persistent_buffers_set)
        tables: dict[str, dict[str, Any]] = {"_modules": module._modules, "_buffers": module._buffers}
        self._tables = [(name, held, dict(held)) for name, held in tables.items()]

    def restore(self) -> None:
        """Restore them, in their order."""
        for name, held, before in self._tables:
            vars(self._module)[name] = held
            restore_dict(held, before)
        if self._module._non_persistent_buffers_set != self._not_saved:
            self._module._non_persistent_buffers_set = set(self._not_saved)


def exchanged(now: Mapping[str, nn.Module | None], before: Mapping[str, nn.Module | None]) -> list[str]:
    """Return the names of children that were replaced, added or removed."""
    names = {**before, **now}
    return [name for name in names if now.get(name, MISSING) is not before.get(name, MISSING)]


#: The methods of torch's containers that change children without ``nn.Module.__setattr__``.
CONTAINER_METHODS: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.ModuleDict, "__delitem__"),
    (nn.ModuleDict, "clear"),
    (nn.ModuleList, "insert"),
    (nn.Sequential, "insert"),
)


def notifying(note: Note) -> Callable[..., Any]:
    """Return a replacement for such a method that calls ``note`` for each child that may change."""

    def change(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for name in [*module._modules, str(len(module._modules))]:
            note(module, name)
        return original_of(change)(module, *args, **kwargs)

    return change
