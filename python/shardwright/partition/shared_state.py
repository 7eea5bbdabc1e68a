"""Python objects that several modules of a model share, and whether a forward changed them.

On several ranks, each rank has its own copy of a cache object that layers share, of a list in two modules, or of a
global variable. So everything that is reachable from attributes of modules, and from the global variables that the code
of their classes uses, is recorded before a forward, and compared and restored after it. A change that a forward makes
before it calls a module and reverts afterwards counts too, because another microbatch may run meanwhile. The state is
therefore also compared at the start and end of every call. The users of each attribute of an object that is not a
container (such as a configuration) are recorded, so that only the users of changed attributes are joined.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from shardwright.contents import INTERNAL, Cell, Search, attributes_of, kind_of, restore_cells
from shardwright.opaque import Kind, are_unchanged, holds_the_very_same
from shardwright.partition.tree import ModelTree
from shardwright.partition.variables import Variable, is_own, variables_of
from shardwright.patches import replaced

#: For containers with more items, only the number of items is compared during a forward.
_MAX_LOOKED_AT = 1024
#: The most containers compared during a forward for a module's attributes or a global variable, nearest first.
_MAX_OF_MODULE, _MAX_OF_VARIABLE = 64, 16
#: The flag of classes whose attributes cannot be set, such as those implemented in C.
_IMMUTABLE = 1 << 8
_MISSING = object()

AttributeKey = tuple[int, str]
"""The id of a module or another object, and the name of one of its attributes."""

#: Attributes that give access to every attribute of an object.
_WHOLE = frozenset({"__dict__", "__reduce_ex__", "__reduce__", "__getstate__"})


class _Cell(Cell):
    """One container or object, with its previous contents and the attributes and variables that reach it."""

    __slots__ = ("attributes", "changed_meanwhile", "children", "names_meanwhile", "size", "variables", "written")

    def __init__(self, value: Any, kind: Kind) -> None:
        super().__init__(value, kind)
        self.attributes: set[AttributeKey] = set()
        self.variables: set[str] = set()
        self.written: set[int] = set()
        self.children: list[Any] = []
        #: Whether it had other contents during the forward, and for an object, in which attributes.
        self.changed_meanwhile = False
        self.names_meanwhile: set[str] = set()
        self.size = kind.size(value)

    @property
    def changed(self) -> bool:
        return self.changed_meanwhile or bool(self.written) or not are_unchanged(self.parts_now, self.parts)

    def look(self) -> None:
        """Record differences from the state before the forward, during the forward."""
        if not self._is_as_before():
            self.changed_meanwhile = True
            if self.kind.has_names:
                self.names_meanwhile.update(self.changed_names())

    def _is_as_before(self) -> bool:
        size = self.kind.size(self.value)
        if size != self.size or size > _MAX_LOOKED_AT:
            return size == self.size
        if type(self.value) is set:
            return bool(self.value.issuperset(self.before))
        return are_unchanged(self.parts_now, self.parts)

    def changed_names(self) -> list[str]:
        """Return the names of an object's attributes that have changed."""
        now, before = self.kind.read(self.value), self.before
        return [
            name
            for name in {**before, **now, **dict.fromkeys(self.names_meanwhile)}
            if name in self.names_meanwhile
            or now.get(name, _MISSING) is not before.get(name, _MISSING)
            or id(now.get(name)) in self.written
        ]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A container or object that has changed.

    Attributes:
        held: The attributes through which modules reach it.
        names: The object and its changed attributes, if the users of these are known; otherwise empty.
    """

    held: set[AttributeKey]
    names: tuple[AttributeKey, ...]


class _Reached(NamedTuple):
    """What some modules and their code reach: lists and dicts with their previous contents, and the rest."""

    containers: list[tuple[Any, Any, _Cell]]
    others: list[_Cell]
    objects: dict[int, _Cell]
    variables: list[str]


class SharedState:
    """The Python objects that the modules of a model can reach, in the state in which they were recorded."""

    def __init__(self, tree: ModelTree) -> None:
        """Record the contents of everything that the modules of `tree` can reach."""
        self._tree = tree
        self._cells: dict[int, _Cell] = {}
        self._tensors: dict[int, tuple[torch.Tensor, list[_Cell]]] = {}
        #: Attributes of objects that were set while they were observed; "" if any attribute may have been.
        self._set: set[AttributeKey] = set()
        #: The modules whose classes use a global variable, by its name.
        self._users: dict[str, list[str]] = {}
        self._variables: dict[str, tuple[Variable, Any]] = {}
        of_class: dict[type, dict[str, Variable]] = {}
        self._modules = [entry.module.__dict__ for entry in tree.modules]
        #: What is reached from a module or a global variable; and, by the paths of modules, from all of them.
        self._cells_of: dict[int | str, list[_Cell]] = {}
        self._variables_of: dict[str, list[str]] = {}
        self._reached: dict[tuple[str, ...], _Reached] = {}
        #: Objects with an attribute that was set, and variables that had another value, during the forward.
        self._set_objects: set[int] = set()
        self._variables_meanwhile: set[str] = set()
        for entry in tree.modules:
            for name, value in attributes_of(entry.module).items():
                if name not in INTERNAL:
                    self._add(value, (id(entry.module), name), None)
            kind = type(entry.module)
            if kind not in of_class:
                of_class[kind] = dict(variables_of(kind))
            self._use(of_class[kind], [entry.path])
        self._add_methods(of_class)

    def _use(self, variables: Mapping[str, Variable], paths: Iterable[str]) -> None:
        """Record that the code of these modules uses these variables."""
        for full_name, variable in variables.items():
            users = self._users.setdefault(full_name, [])
            users += [path for path in paths if path not in users]
            if full_name not in self._variables:
                self._variables[full_name] = (variable, variable.read())
                self._add(self._variables[full_name][1], None, full_name)

    def _add_methods(self, of_class: dict[type, dict[str, Variable]]) -> None:
        """Add what the methods of reachable objects use, for objects of the script's own classes."""
        cells = list(self._cells.values())
        for cell in cells:  # grows during the iteration
            kind = type(cell.value)
            if not cell.kind.has_names or not is_own(kind.__module__):
                continue
            if kind not in of_class:
                of_class[kind] = dict(variables_of(kind))
            known = len(self._cells)
            holders = (self._tree.path_of[module] for module, _ in cell.attributes)
            self._use(of_class[kind], [*holders, *(path for name in cell.variables for path in self._users[name])])
            cells += list(self._cells.values())[known:]

    def _add(self, value: Any, attribute: AttributeKey | None, variable: str | None) -> None:
        search = Search(value)
        for one in search:
            kind = kind_of(type(one))
            if kind is None:
                continue
            if kind.write is None:
                search.follow(kind.parts(kind.read(one)), holds=False)
                continue
            cell = self._cells.get(id(one))
            if cell is None:
                cell = self._cells[id(one)] = self._made(one, kind)
            elif (attribute is None or attribute in cell.attributes) and (
                variable is None or variable in cell.variables
            ):
                continue
            if attribute is not None:
                cell.attributes.add(attribute)
            if variable is not None:
                cell.variables.add(variable)
            search.follow(cell.children, holds=True)

    def _made(self, value: Any, kind: Kind) -> _Cell:
        cell = _Cell(value, kind)
        items = cell.parts
        for item in items:  # grows during the iteration
            inner = kind_of(type(item))
            if inner is None:
                if isinstance(item, torch.Tensor):
                    self._tensors.setdefault(id(item), (item, []))[1].append(cell)
            elif inner.write is None:
                items += inner.parts(inner.read(item))
            else:
                cell.children.append(item)
        return cell

    def tensors(self) -> Iterator[torch.Tensor]:
        """Return the tensors found in containers and objects."""
        return (tensor for tensor, _ in self._tensors.values())

    def held_tensors(self) -> Iterator[tuple[torch.Tensor, AttributeKey]]:
        """Return those tensors, each with every attribute through which modules reach it."""
        return ((tensor, key) for tensor, cells in self._tensors.values() for cell in cells for key in cell.attributes)

    def written(self, tensor: torch.Tensor) -> None:
        """Record an operation that writes to this tensor."""
        found = self._tensors.get(id(tensor))
        for cell in found[1] if found is not None else ():
            cell.written.add(id(tensor))

    @contextlib.contextmanager
    def watching(self, note: Callable[[AttributeKey], None]) -> Iterator[None]:
        """Call `note` with each attribute of an object that is read, set or deleted."""
        kinds = dict.fromkeys(type(cell.value) for cell in self._cells.values() if cell.kind.has_names)

        def used(value: Any, name: str, sets: bool) -> None:
            if id(value) in self._cells:
                note((id(value), name))
                if sets or not name:
                    self._set.add((id(value), name))
                    self._set_objects.add(id(value))

        with contextlib.ExitStack() as stack:
            for kind in kinds:
                if not kind.__flags__ & _IMMUTABLE:
                    stack.enter_context(_watched(kind, used))
            yield

    def holders(self, number: int) -> set[AttributeKey]:
        """Return the attributes through which modules reach a container or an object, given by its id."""
        cell = self._cells.get(number)
        return set() if cell is None else cell.attributes

    def places(self) -> Iterator[tuple[Hashable, set[str]]]:
        """Yield the places of variables and of their contents, each with the modules that use it.

        A variable's place is the id of its cell, or the id of its holder and its name. The place of its contents is
        their id.
        """
        for full_name, (variable, _) in self._variables.items():
            key = id(variable.holder)
            place = key if isinstance(variable.holder, types.CellType) else (key, variable.name)
            yield place, set(self._users[full_name])
        for number, cell in self._cells.items():
            for full_name in cell.variables:
                yield number, set(self._users[full_name])

    def look(self, paths: Iterable[str]) -> None:
        """Record, during a forward, changes in what these modules and their code reach."""
        around = tuple(paths)
        reached = self._reached.get(around)
        if reached is None:
            reached = self._reached[around] = self._reached_by({*around})
        for value, before, cell in reached.containers:
            if not holds_the_very_same(value, before):
                cell.changed_meanwhile = True
        for cell in reached.others:
            cell.look()
        for number in self._set_objects & reached.objects.keys():
            reached.objects[number].look()
        for full_name in reached.variables:
            variable, value_before = self._variables[full_name]
            if variable.read() is not value_before:
                self._variables_meanwhile.add(full_name)

    def _reached_by(self, paths: set[str]) -> _Reached:
        if not self._cells_of:
            for cell in self._cells.values():
                for holder in {holder for holder, _ in cell.attributes}:
                    self._cells_of.setdefault(holder, []).append(cell)
                for variable in cell.variables:
                    self._cells_of.setdefault(variable, []).append(cell)
            for name, users in self._users.items():
                for user in users:
                    self._variables_of.setdefault(user, []).append(name)
        variables = list(dict.fromkeys(name for path in paths for name in self._variables_of.get(path, ())))
        cells: dict[int, _Cell] = {}
        for path in paths:
            own = self._cells_of.get(id(self._tree.by_path[path].module), [])
            cells |= {id(cell.value): cell for cell in own[:_MAX_OF_MODULE]}
        for name in variables:
            cells |= {id(cell.value): cell for cell in self._cells_of.get(name, [])[:_MAX_OF_VARIABLE]}
        reached = _Reached([], [], {}, variables)
        for number, cell in cells.items():
            if cell.kind.has_names and not type(cell.value).__flags__ & _IMMUTABLE:
                reached.objects[number] = cell  # changes are recorded when an attribute is set
            elif type(cell.value) in (list, dict):
                reached.containers.append((cell.value, cell.before, cell))
            else:
                reached.others.append(cell)
        return reached

    def changes(self) -> Iterator[Change]:
        """Yield the containers and objects that have changed."""
        for cell in self._cells.values():
            if not cell.attributes or not cell.changed:
                continue
            names: list[AttributeKey] = []
            if cell.kind.has_names and (id(cell.value), "") not in self._set:
                names = [(id(cell.value), name) for name in cell.changed_names()]
            # If an attribute changed without an observed write, any user may have changed it.
            yield Change(held=cell.attributes, names=tuple(names) if self._set.issuperset(names) else ())

    def changed_variables(self) -> dict[str, list[str]]:
        """Return the global variables that have changed, with the paths of the modules that use them."""
        names = {name for cell in self._cells.values() if cell.variables and cell.changed for name in cell.variables}
        names |= {
            full_name for full_name, (variable, before) in self._variables.items() if variable.read() is not before
        } | self._variables_meanwhile
        return {name: self._users[name] for name in sorted(names)}

    def restore(self) -> None:
        """Restore what has changed, except the values of tensors."""
        for variable, before in self._variables.values():
            if variable.read() is not before:
                variable.write(before)
        holders = [variable.holder for variable, _ in self._variables.values()]
        used = {id(holder): holder for holder in holders if isinstance(holder, dict)}
        restore_cells(self._cells.values(), [*self._modules, *used.values()])


def _watched(kind: type, used: Callable[[Any, str, bool], None]) -> contextlib.AbstractContextManager[None]:
    get: Any = kind.__getattribute__
    put: Any = kind.__setattr__
    delete: Any = kind.__delattr__

    def is_own(value: Any, name: str) -> bool:
        return name not in _WHOLE and (hasattr(kind, name) or name in object.__getattribute__(value, "__dict__"))

    def __getattribute__(value: Any, name: str) -> Any:
        try:
            item = get(value, name)
        except AttributeError:
            used(value, "" if hasattr(kind, "__getattr__") else name, False)
            raise
        # A name that is not an attribute of its own may stand for any attribute.
        used(value, name if is_own(value, name) else "", False)
        return item

    def __setattr__(value: Any, name: str, item: Any) -> None:
        put(value, name, item)
        used(value, name if is_own(value, name) else "", True)

    def __delattr__(value: Any, name: str) -> None:
        used(value, name, True)
        delete(value, name)

    return replaced(
        kind, {"__getattribute__": __getattribute__, "__setattr__": __setattr__, "__delattr__": __delattr__}
    )
