"""State of modules: recorded to be restored, and watched for changes that the trace did not see."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwright.contents import INTERNAL, Cell, attributes_of, kind_of, put_values, reached, restore_cells
from shardwright.execution.children import Members, own_value, set_own, value_of
from shardwright.frames.remote import is_remote
from shardwright.opaque import MAX_BYTES, are_same, holds_the_very_same, is_same

if TYPE_CHECKING:
    from shardwright.execution.task import RunningTask

#: An object, and the name of one of its attributes.
Attribute = tuple[Any, str]

_UNNOTICED = INTERNAL - {"__class__"}
#: Containers with more items are not watched.
MAX_ITEMS = 256


def attribute_of(name: str, modules: Mapping[str, nn.Module]) -> tuple[str, str] | None:
    """Split the full name of an attribute into module path and attribute name; None if it is not one of a module."""
    path, _, attribute = name.rpartition(".")
    return (path, attribute) if path in modules else None


def variable_of(name: str, modules: Mapping[str, nn.Module]) -> Attribute | None:
    """Return the Python module and the name of a global variable with this full name; None if it is not one."""
    path, _, variable = name.rpartition(".")
    home = sys.modules.get(path)
    return None if path in modules or home is None else (home, variable)


def version_of(tensor: torch.Tensor) -> int:
    """Return the version counter of a tensor; 0 if it has none, or if its values are on another rank."""
    return 0 if is_remote(tensor) or tensor.is_inference() else tensor._version


@dataclass(frozen=True, slots=True)
class Seen:
    """A record of an attribute: its value, the contents of the value, and the versions of its tensors."""

    values: list[Any]
    versions: list[int]

    def is_like(self, other: Seen) -> bool:
        """Return whether nothing has changed between the two records."""
        return self.versions == other.versions and self.has_values_of(other)

    def has_values_of(self, other: Seen) -> bool:
        """Return whether nothing has changed except the values of tensors."""
        return are_same(self.values, other.values)


def seen_of(place: Attribute) -> Seen:
    """Record an attribute now."""
    value = value_of(*place)
    values, versions = [value], [version_of(value)] if isinstance(value, nn.Parameter) else []
    for part in reached(value):
        kind = kind_of(type(part))
        if kind is None:
            versions.append(version_of(part))
        else:
            values += kind.parts(kind.read(part))
    return Seen(values, versions)


class _Watched:
    """A tensor that no forward is known to write to, with a copy if it is small and not copied elsewhere."""

    __slots__ = ("has_values", "is_copied", "module", "name", "tensor", "values", "version")

    def __init__(self, module: nn.Module, name: str, tensor: torch.Tensor, *, is_copied: bool) -> None:
        self.module, self.name, self.tensor = module, name, tensor
        self.is_copied = is_copied
        self.has_values = not is_copied and _is_small(tensor)
        self.version = -1
        self.values: torch.Tensor | None = None
        self.begin()

    def begin(self) -> None:
        """Record its version, and a copy of its values if one is kept, to restore later."""
        version = version_of(self.tensor)
        if version != self.version or (self.has_values and self.values is None):
            self.version = version
            self.values = self.tensor.detach().clone() if self.has_values else None

    @property
    def changed(self) -> bool:
        return version_of(self.tensor) != self.version

    def end(self) -> None:
        """If the step wrote to it and it is not copied elsewhere, copy it from the next step on."""
        if self.changed and not self.is_copied:
            self.has_values = _has_memory(self.tensor)

    def restore(self) -> None:
        """Restore its values, if it has changed and there is a copy."""
        if self.values is not None and self.changed:
            put_values(self.tensor, self.values)


def no_copy_of(names: list[str]) -> str:
    """Return a message on why a step that wrote to these tensors cannot be undone."""
    return (
        f"Tensor {', '.join(names)} was written to, though the trace of the first step saw no such write, and is too "
        f"large ({MAX_BYTES >> 10} KiB are the limit) to be copied before every step in case it has to be put back: "
        "this write cannot be undone. From the next step on it is copied, so that a step that writes to it can be."
    )


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and not is_remote(tensor)


def _is_small(tensor: torch.Tensor) -> bool:
    return _has_memory(tensor) and tensor.numel() * tensor.element_size() <= MAX_BYTES


#: Code that uses one of these names may set attributes, or replace children, without ``nn.Module.__setattr__``.
_PAST_SETATTR = frozenset({"__dict__", "vars", "__setattr__", "__setstate__"})
_CHILDREN = frozenset({"_modules"})


def _mentions(kind: type, names: frozenset[str]) -> bool:
    """Return whether the code of a module's class, except torch's own classes, uses one of these names."""
    codes = []
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] != "torch":
            functions = [getattr(value, "__func__", value) for value in vars(base).values()]
            codes += [function.__code__ for function in functions if isinstance(function, types.FunctionType)]
    for code in codes:  # the list grows during the loop
        if not names.isdisjoint(code.co_names):
            return True
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return False


def is_untouched(cell: Cell) -> bool:
    """Compare the items of a container or object by identity; fast, and False if the result is not known."""
    value, before = cell.value, cell.before
    if cell.kind.has_names:
        if not type(value).__dictoffset__:
            return False
        value = object.__getattribute__(value, "__dict__")
    elif not isinstance(value, list | dict):
        value = cell.kind.read(value)
    if type(before) is bytes:
        return bool(value == before)
    return holds_the_very_same(value, before)


class Watch:
    """Detect changes of values in modules that no forward is known to change.

    Tensors are compared by version, attributes are observed when they are set, and small containers and objects are
    compared by their contents.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], settled: set[str], nameless: set[str], copied: Iterable[nn.Module]
    ) -> None:
        """Find the values to watch.

        Args:
            modules: The modules that run here, by path.
            settled: Full names of attributes and buffers that forwards are known to change.
            nameless: Paths of modules that are known to change tensors that are not buffers.
            copied: Modules whose tensors a `Snapshot` copies.
        """
        self._modules = {module: path for path, module in modules.items()}
        self._settled = settled
        self._nameless = nameless
        self._copied = set(copied)
        self.is_stale = False
        self._set: list[tuple[nn.Module, str, Any]] = []
        self._members: dict[nn.Module, Members] = {}
        self._tensors: list[_Watched] = []
        self._cells: list[tuple[nn.Module, str, Cell]] = []
        #: Attributes of modules whose code may set them without ``__setattr__``.
        self._places: list[tuple[nn.Module, str, Any]] = []
        self._inside: dict[nn.Module, tuple[list[Any], list[Any], list[Any]]] = {}
        #: By the path of a module on another rank, the containers that modules around it hold.
        self._around: dict[str, list[tuple[nn.Module, str, Cell]]] = {}
        #: Parameters that no forward is known to write to, and their versions; by module for those in it.
        self._weights: list[tuple[nn.Module, str, nn.Parameter, int]] = []
        self._weights_in: dict[nn.Module, list[tuple[nn.Module, str, nn.Parameter, int]]] = {}
        self._find()

    def _find(self) -> None:
        self.is_stale = False
        self._inside, self._around = {}, {}
        earlier = {id(one.tensor): one for one in self._tensors}
        self._tensors, self._cells, self._places = [], [], []
        self._weights = [
            (module, name, weight, weight._version)
            for module, path in self._modules.items()
            for name, weight in module._parameters.items()
            if isinstance(weight, nn.Parameter) and not self._is_settled(path, name)
        ]
        known: set[int] = set()
        kinds: dict[type, tuple[bool, bool]] = {}
        for module, path in self._modules.items():
            values = [(name, value) for name, value in attributes_of(module).items() if name not in INTERNAL]
            for name, value in [*module._buffers.items(), *values]:
                if self._is_settled(path, name):
                    known.update(id(part) for part in reached(value))
        for module, path in self._modules.items():
            values = [(name, value) for name, value in attributes_of(module).items() if name not in INTERNAL]
            kind = type(module)
            if kind not in kinds:
                kinds[kind] = _mentions(kind, _PAST_SETATTR), _mentions(kind, _CHILDREN)
            past, exchanges = kinds[kind]
            if exchanges and not any(self._is_settled(path, name) for name in module._modules):
                self._add(module, "_modules", module._modules, earlier)
            if past:
                self._places += [(module, name, value) for name, value in values if not self._is_settled(path, name)]
            for name, value in [*module._buffers.items(), *values]:
                if self._is_settled(path, name):
                    continue
                for part in reached(value, known):
                    self._add(module, name, part, earlier)

    def _is_settled(self, path: str, name: str) -> bool:
        return (f"{path}.{name}" if path else name) in self._settled

    def _add(self, module: nn.Module, name: str, part: Any, earlier: Mapping[int, _Watched]) -> None:
        if isinstance(part, torch.Tensor):
            is_buffer = name in module._buffers  # buffers are restored by the step
            if type(part) is not torch.Tensor or (not is_buffer and self._modules[module] in self._nameless):
                return
            one = earlier.get(id(part)) or _Watched(module, name, part, is_copied=is_buffer or module in self._copied)
            one.begin()
            self._tensors.append(one)
        elif (kind := kind_of(type(part))) is not None and kind.size(part) <= MAX_ITEMS:
            self._cells.append((module, name, Cell(part, kind)))

    def begin_step(self) -> None:
        """Record the current values, including the script's changes between steps."""
        self._weights_in = {}
        self._weights = [(module, name, weight, weight._version) for module, name, weight, _ in self._weights]
        if self.is_stale:
            self._find()
        elif self._tensors or self._cells or self._places:
            self._places = [(module, name, value_of(module, name)) for module, name, _ in self._places]
            for one in self._tensors:
                one.begin()
            self._cells = [(module, name, Cell(cell.value, cell.kind)) for module, name, cell in self._cells]
            self._inside, self._around = {}, {}

    def end_step(self) -> None:
        """Clear the record of attributes that were set."""
        self._set.clear()
        self._members.clear()
        for one in self._tensors:
            one.end()

    def is_set(self, task: RunningTask, module: nn.Module, name: str) -> None:
        """Record an attribute that a task is about to set."""
        path = self._modules.get(module)
        if path is not None and name not in _UNNOTICED and not self._is_settled(path, name):
            task.sets.append((module, name, value_of(module, name)))
            self._set.append((module, name, own_value(module, name)))
            self._members.setdefault(module, Members(module))

    def is_switched(self, module: nn.Module, name: str) -> bool:
        """Record a change of an attribute of torch's own; return whether no forward is known to change it."""
        path = self._modules.get(module)
        if path is None or self._is_settled(path, name):
            return False
        self._set.append((module, name, own_value(module, name)))
        return True

    def written(self, task: RunningTask, within: nn.Module | None) -> str | None:
        """Describe what a task has changed; return None if nothing.

        Args:
            task: The task.
            within: The module that the task ran; None for all modules on this rank.
        """
        tensors, cells, places = (self._tensors, self._cells, self._places) if within is None else self._of(within)
        for module, name, before in [*task.sets, *places] if places else task.sets:
            if module in self._modules and not is_same(value_of(module, name), before):
                return f"attribute {self.name_of(module, name)}"
        for one in tensors:
            if one.changed:
                return f"tensor {self.name_of(one.module, one.name)}"
        for module, name, cell in cells:
            if not are_same(cell.parts_now, cell.parts):
                return f"what {self.name_of(module, name)} holds"
        return None

    def changed_late(self, task: RunningTask) -> str | None:
        """Describe what any task has changed in this step; None if nothing. Report attributes even if changed back."""
        if self._set:
            module, name, _ = self._set[0]
            return f"attribute {self.name_of(module, name)}"
        return self.written(task, None)

    def changed(self) -> Iterator[tuple[str, Any]]:
        """Yield the quoted name of each changed attribute, with the tensor or container that changed (or None)."""
        yield from ((self.name_of(one.module, one.name), one.tensor) for one in self._tensors if one.changed)
        for module, name, cell in self._cells:
            if not are_same(cell.parts_now, cell.parts):
                yield self.name_of(module, name), cell.value
        for module, name, before in [*self._set, *self._places]:
            if not is_same(value_of(module, name), before):
                yield self.name_of(module, name), None

    def written_meanwhile(self, name: str) -> str | None:
        """Describe a list, dict or object that has changed before a call of the module at path `name`; None if none.

        The task may undo the change before it ends, but other microbatches would see it until then. Only containers of
        the modules around the called one are compared, by identity first, because this runs at every call.
        """
        around = self._around.get(name)
        if around is None:
            inside = f"{name}."
            holders = {module for module, path in self._modules.items() if inside.startswith(path and f"{path}.")}
            around = self._around[name] = [
                (module, attribute, cell)
                for module, attribute, cell in self._cells
                if module in holders and type(cell.before) in (list, dict, bytes)
            ]
        for module, attribute, cell in around:
            if not is_untouched(cell) and not are_same(cell.parts_now, cell.parts):
                return f"what {self.name_of(module, attribute)} holds"
        return None

    def written_weight(self, within: nn.Module | None) -> str | None:
        """Return the full name of a parameter that was written to since the step began; None if there is none.

        Args:
            within: The module to look in; None for all modules on this rank.
        """
        weights = self._weights
        if within is not None:
            if within not in self._weights_in:
                inside = set(within.modules())
                self._weights_in[within] = [entry for entry in weights if entry[0] in inside]
            weights = self._weights_in[within]
        return next((self.name_of(m, name) for m, name, tensor, version in weights if tensor._version != version), None)

    def _of(self, within: nn.Module) -> tuple[list[Any], list[Any], list[Any]]:
        found = self._inside.get(within)
        if found is None:
            if not self._tensors and not self._cells and not self._places:
                return [], [], []
            inside = set(within.modules())
            found = self._inside[within] = (
                [one for one in self._tensors if one.module in inside],
                [entry for entry in self._cells if entry[0] in inside],
                [entry for entry in self._places if entry[0] in inside],
            )
        return found

    def path_of(self, module: nn.Module) -> str:
        """Return the path of a module that runs on this rank."""
        return self._modules[module]

    def name_of(self, module: nn.Module, name: str) -> str:
        """Return the full name of an attribute, quoted."""
        path = self._modules[module]
        return repr(f"{path}.{name}" if path else name)

    def lost(self) -> list[str]:
        """Return the full names of tensors that were written to and cannot be restored."""
        tensors = [one for one in self._tensors if one.values is None and not one.is_copied and one.changed]
        return [self.name_of(one.module, one.name) for one in tensors]

    def restore(self) -> list[str]:
        """Restore attributes, and the contents of containers and tensors.

        Returns:
            The full names of tensors that cannot be restored.
        """
        lost = self.lost()
        for one in self._tensors:
            one.restore()
        for module, name, before in [*reversed(self._set), *self._places]:
            set_own(module, name, before)
        for members in self._members.values():
            members.restore()
        holders = [vars(module) for module in {id(module): module for module, _, _ in self._cells}.values()]
        if restore_cells((cell for _, _, cell in self._cells), holders):
            self.is_stale = True  # watch the copies of iterators from now on
        return lost
