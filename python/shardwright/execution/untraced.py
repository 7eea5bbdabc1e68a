"""State of modules of a model that one rank runs whole: no trace has told what its forwards change."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from shardwright.contents import (
    INTERNAL,
    Cell,
    attributes_of,
    kind_of,
    put_attributes,
    put_values,
    reached,
    restore_cells,
    restore_dict,
    slots_of,
)
from shardwright.execution.kept import MAX_ITEMS, is_untouched, version_of
from shardwright.opaque import MAX_BYTES, SIMPLE, Kind, are_unchanged, holds_the_very_same

#: The ``id`` of a module, and the name of one of its attributes.
_Place = tuple[int, str]
_TABLES = ("_modules", "_parameters", "_buffers")


class UntracedState:
    """What the modules of a model hold besides gradients and values of buffers, to undo a step that fails.

    Every step pays for it, so it copies what is cheap: the attributes of each module, and its tables of children and
    parameters. What the attributes lead to is looked for once, and again where they have changed. Of it, small tensors
    and containers are copied before each step; large ones before the first step that finds them there, and later only
    where a step has changed them. Parameters are copied where a forward of an earlier step has written to them.
    """

    def __init__(self, module: nn.Module, *, keeps_parameters: bool) -> None:
        """Create it.

        Args:
            module: The model.
            keeps_parameters: Whether only code of the script changes parameters within steps: they are not sharded.
        """
        self._module = module
        self._keeps_parameters = keeps_parameters
        self._has_begun = False
        self._modules: list[nn.Module] = []
        self._held: list[dict[str, Any]] = []
        self._attributes: list[dict[str, Any]] = []
        self._kinds: list[type] = []
        self._lengths: list[int] = []
        #: Modules of classes that are not torch's, and others that hold what those of torch do not.
        self._watched: list[int] = []
        self._slotted: list[int] = []
        #: The tables of children and parameters, how much is in them, those that hold something, that, and copies.
        self._tables: list[dict[str, Any]] = []
        self._size = -1
        self._filled: list[dict[str, Any]] = []
        self._members: list[Any] = []
        self._copies: list[dict[str, Any]] = []
        #: The tables of buffers and the names of those that are not saved, and copies of those that hold something.
        self._buffer_tables: list[dict[str, Any]] = []
        self._buffers: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._name_sets: list[set[str]] = []
        self._not_saved: list[tuple[set[str], set[str]]] = []
        #: By the number of a module, those of its attributes that lead to state.
        self._roots: dict[int, dict[str, Any]] = {}
        self._is_stale = True
        self._parts: list[_Tensor | _Container] = []
        #: Where large parts were found by earlier steps, and where they were changed.
        self._known: set[_Place] = set()
        self._changed_at: set[_Place] = set()
        self._weights: list[nn.Parameter] = []
        self._versions: list[int] = []
        #: Parameters that forwards write to, and their values.
        self._written: list[nn.Parameter] = []
        self._values: list[tuple[nn.Parameter, torch.Tensor]] = []

    def begin_step(self) -> None:
        """Record what the step may change."""
        if self._has_other_members():
            self._list()
        changed = self._changed()
        self._attributes = list(map(dict.copy, self._held))
        for number in self._slotted:
            self._attributes[number] = dict(attributes_of(self._modules[number]))
        self._kinds = list(map(type, self._modules))
        self._copies = list(map(dict.copy, self._filled))
        self._buffers = [(table, table.copy()) for table in self._buffer_tables if table]
        self._not_saved = [(names, names.copy()) for names in self._name_sets if names]
        for number in changed:
            self._look_at(number)
        if not self._is_stale:
            for part in self._parts:
                self._is_stale |= part.begin(copies=self._copies_of(part))
        if self._is_stale:
            self._find()
        if self._keeps_parameters:
            self._versions = [weight._version for weight in self._weights]
            self._values = [(weight, weight.detach().clone()) for weight in self._written]
        self._has_begun = True

    def end_tasks(self) -> None:
        """See which parameters forwards and backwards write to: these are copied from the next step on."""
        self._written += self._newly_written()

    def end_step(self) -> None:
        """See which large parts a step has changed: copies of the others are not made any more."""
        self._has_begun = False
        self._values = []
        for part in self._parts:
            if part.is_large:
                if part.has_changed:
                    self._changed_at.add(part.place)
                self._known.add(part.place)
                if not self._copies_of(part):
                    part.copy = None

    def rollback(self) -> list[str]:
        """Undo the changes of the step; return the names of what was written to without a copy of it."""
        if not self._has_begun:
            return []
        self._has_begun = False
        lost = self._lost()
        wanted = {id(table): before for table, before in zip(self._filled, self._copies, strict=True)}
        wanted.update((id(table), before) for table, before in self._buffers)
        for table in (*self._tables, *self._buffer_tables):
            restore_dict(table, wanted.get(id(table), {}))
        not_saved = {id(names): before for names, before in self._not_saved}
        for names in self._name_sets:
            names.clear()
            names.update(not_saved.get(id(names), ()))
        for module, own, before, kind in zip(self._modules, self._held, self._attributes, self._kinds, strict=True):
            _put_back(module, own, before, kind)
        cells = [part.copy for part in self._parts if isinstance(part, _Container) and part.copy is not None]
        if restore_cells(cells, self._held):
            self._is_stale = True  # iterators are others now
        for part in self._parts:
            if isinstance(part, _Tensor):
                part.put_back()
        for weight, values in self._values:
            if not torch.equal(weight, values):
                put_values(weight, values)
        self._values = []
        return lost

    # --- modules

    def _has_other_members(self) -> bool:
        if sum(map(len, self._tables)) != self._size:
            return True
        now = list(chain.from_iterable(map(dict.values, self._filled)))
        return len(now) != len(self._members) or not all(map(operator.is_, now, self._members))

    def _list(self) -> None:
        self._modules = [one for one in self._module.modules() if not isinstance(one, torch.jit.ScriptModule)]
        self._held = [vars(module) for module in self._modules]
        self._attributes, self._roots, self._is_stale = [], {}, True
        self._watched = [n for n, one in enumerate(self._modules) if not type(one).__module__.startswith("torch.")]
        self._slotted = [n for n, one in enumerate(self._modules) if slots_of(type(one))]
        self._tables = [held["_modules"] for held in self._held]
        if self._keeps_parameters:
            self._tables += [held["_parameters"] for held in self._held]
        self._buffer_tables = [held["_buffers"] for held in self._held]
        self._name_sets = [held["_non_persistent_buffers_set"] for held in self._held]
        self._filled = [table for table in self._tables if table]
        self._size = sum(map(len, self._tables))
        self._members = list(chain.from_iterable(map(dict.values, self._filled)))
        if self._keeps_parameters:
            found = {id(one): one for held in self._held for one in held["_parameters"].values() if one is not None}
            self._weights = [one for one in found.values() if not one.is_inference()]
            self._written = [one for one in self._written if id(one) in found]

    def _changed(self) -> list[int]:
        """Return the numbers of the modules that may hold other values than when the last step began."""
        lengths = list(map(len, self._held))
        if not self._attributes:
            self._lengths = lengths
            return list(range(len(self._modules)))
        held, before = self._held, self._attributes
        changed = {n for n in self._watched if not all(map(operator.is_, held[n].values(), before[n].values()))}
        if lengths != self._lengths:
            pairs = enumerate(zip(lengths, self._lengths, strict=True))
            changed.update(number for number, (now, earlier) in pairs if now != earlier)
            self._lengths = lengths
        return [*changed.union(self._slotted)]

    def _look_at(self, number: int) -> None:
        """See which attributes of a module lead to state now."""
        found = self._attributes[number].items()
        roots = {name: value for name, value in found if name not in INTERNAL and _leads_on(value)}
        if not holds_the_very_same(roots, self._roots.get(number, {})):
            self._is_stale, self._roots[number] = True, roots
            if number not in self._watched:
                self._watched.append(number)

    # --- what their attributes lead to

    def _find(self) -> None:
        self._is_stale, self._parts = False, []
        seen: set[int] = set()
        for number, roots in self._roots.items():
            for name, value in roots.items():
                place = (id(self._modules[number]), name)
                for found in reached(value, seen):
                    kind = kind_of(type(found))
                    part = _Tensor(place, found) if kind is None else _Container(place, found, kind)
                    part.begin(copies=self._copies_of(part))
                    self._parts.append(part)

    def _copies_of(self, part: _Tensor | _Container) -> bool:
        return not part.is_large or part.place in self._changed_at or part.place not in self._known

    def _lost(self) -> list[str]:
        parts = [part for part in self._parts if part.copy is None and part.has_changed]
        self._changed_at.update(part.place for part in parts)
        weights = self._newly_written()
        self._written += weights
        if not parts and not weights:
            return []
        paths = {id(module): path for path, module in self._module.named_modules()}
        names = {id(weight): name for name, weight in self._module.named_parameters()}
        places = dict.fromkeys(part.place for part in parts)
        attributes = [f"{paths.get(module, '')}.{name}".removeprefix(".") for module, name in places]
        return [repr(name) for name in (*attributes, *(names.get(id(weight), "?") for weight in weights))]

    def _newly_written(self) -> list[nn.Parameter]:
        if not self._keeps_parameters:
            return []
        if [weight._version for weight in self._weights] == self._versions:
            return []
        known = set(map(id, self._written))
        pairs = zip(self._weights, self._versions, strict=True)
        return [one for one, version in pairs if one._version != version and id(one) not in known]


class _Tensor:
    """A tensor that is neither parameter nor buffer."""

    __slots__ = ("copy", "is_large", "place", "tensor", "version")

    def __init__(self, place: _Place, tensor: torch.Tensor) -> None:
        self.place, self.tensor = place, tensor
        self.is_large = tensor.numel() * tensor.element_size() > MAX_BYTES
        self.version = 0
        self.copy: torch.Tensor | None = None

    def begin(self, *, copies: bool) -> bool:
        """Record it; return whether it leads to other values than before, which it never does."""
        self.version = version_of(self.tensor)
        has_memory = self.tensor.layout is torch.strided and not self.tensor.is_meta
        self.copy = self.tensor.detach().clone() if copies and has_memory else None
        return False

    @property
    def has_changed(self) -> bool:
        return version_of(self.tensor) != self.version

    def put_back(self) -> None:
        tensor, copy = self.tensor, self.copy
        if copy is None:
            return
        if (tensor.dtype, tensor.device) != (copy.dtype, copy.device):
            tensor.data = copy
        # One that is written to past its version has the same.
        elif self.has_changed or tensor.is_inference() or not torch.equal(tensor, copy):
            put_values(tensor, copy)


class _Container:
    """A container or an object with attributes."""

    __slots__ = ("copy", "kind", "place", "size", "value")

    def __init__(self, place: _Place, value: Any, kind: Kind) -> None:
        self.place, self.value, self.kind = place, value, kind
        self.size = kind.size(value)
        self.copy: Cell | None = None

    def begin(self, *, copies: bool) -> bool:
        """Record it; return whether it may lead to other values than before."""
        changed = self.has_changed
        if changed or (self.copy is None) == copies:
            self.size = self.kind.size(self.value)
            self.copy = Cell(self.value, self.kind) if copies else None
        return changed and any(map(_leads_on, self.kind.parts(self.kind.read(self.value))))

    @property
    def is_large(self) -> bool:
        return self.size > MAX_ITEMS

    @property
    def has_changed(self) -> bool:
        copy = self.copy
        if copy is None:
            return self.kind.size(self.value) != self.size
        if type(copy.before) in (list, dict, bytes) and is_untouched(copy):
            return False
        return not are_unchanged(copy.parts, copy.parts_now)


def _leads_on(value: Any) -> bool:
    """Return whether a value is, or leads to, something that can change."""
    return type(value) not in SIMPLE and (isinstance(value, torch.Tensor) or kind_of(type(value)) is not None)


def _put_back(module: nn.Module, own: dict[str, Any], before: dict[str, Any], kind: type) -> None:
    if type(module) is not kind:
        if issubclass(kind, LazyModuleMixin):
            return  # it has got its parameters, which stay
        object.__setattr__(module, "__class__", kind)
    if len(own) != len(before) or not all(map(operator.is_, own.values(), before.values())):
        put_attributes(module, {name: value for name, value in before.items() if name not in INTERNAL}, INTERNAL)
        own.update({name: before[name] for name in ("training", *_TABLES)})


def not_undone(names: Iterable[str]) -> str:
    """Return a message on why a step that wrote to these cannot be undone."""
    return (
        f"{', '.join(names)} was written to, which no earlier step has done, and is too large to be copied before "
        "every step in case it has to be put back: this write cannot be undone. From the next step on it is copied, so "
        "that a step that writes to it can be"
    )
