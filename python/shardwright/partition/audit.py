"""Which modules must share a rank because one reads what another holds or writes.

Parameters and buffers live on one rank, and an attribute that a forward sets is seen only on the rank that set it. So
a module that computes with another's weight, or reads an attribute another one wrote, is joined with it. Looking at a
dtype or a shape needs nothing: sentinels answer that.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from shardwright.contents import INTERNAL
from shardwright.execution.children import CONTAINER_METHODS, exchanged, notifying
from shardwright.execution.placed import KeptState
from shardwright.huggingface.collector import collects
from shardwright.partition.decision import JoinReason
from shardwright.partition.flows import CrossingFlow, merged, scope_of
from shardwright.partition.observe import Execution, Stack
from shardwright.partition.shared_state import SharedState
from shardwright.partition.structure import shared_buffer_joins
from shardwright.partition.tree import ModelTree, TensorEntry, address, hooks_on, join_path
from shardwright.partition.unversioned import silently_written
from shardwright.patches import original_of, replaced


class Audit:
    """Collects joins during one forward of a model.

    Make it once the model runs with the buffers of the trace in place, so that it knows them.
    """

    def __init__(self, tree: ModelTree, stack: Stack, shared: SharedState) -> None:
        """Know every parameter and buffer of the model by identity."""
        self._tree = tree
        self._stack = stack
        self._joins: dict[tuple[str, str], str] = {}
        self._known: dict[int, TensorEntry] = {id(entry.tensor): entry for entry in tree.parameters}
        #: By number, the version of each parameter and where its values are.
        self._weights = {id(entry.tensor): (entry.tensor._version, address(entry.tensor)) for entry in tree.parameters}
        self._buffers: dict[int, int] = {}
        # A forward may put another tensor in a buffer's place; the first one's number must not be used again.
        self._alive: list[torch.Tensor] = []
        self._written_buffers: set[int] = set()
        for module in tree.modules:
            for name, index in module.buffers.items():
                buffer = module.module._buffers[name]
                if buffer is not None:
                    self._known[id(buffer)] = tree.buffers[index]
                    self._buffers[id(buffer)] = index
                    self._alive.append(buffer)
        self._children = {entry.path: dict(entry.module._modules) for entry in tree.modules}
        self._before = {id(entry.module): dict(vars(entry.module)) for entry in tree.modules}
        #: Who changes what torch itself keeps in modules, by path and name: hooks, and whether they train.
        self._own: dict[tuple[str, str], set[str]] = {}
        self._hooks = {entry.path: hooks_on(entry.module) for entry in tree.modules}
        self._readers: dict[tuple[int, str], set[str]] = {}
        self._missed: set[tuple[int, str]] = set()
        #: Who used buffers, by number, and attributes of modules and other objects, by id and name.
        self._users: dict[int | tuple[int, str], set[str]] = {}
        self._writes: dict[tuple[int, str], set[str]] = {}
        self._read_first: set[tuple[int, str]] = set()
        self._shared = shared
        self._executions: Counter[str] = Counter()
        #: Who last wrote an attribute of a module without parameters: the executions around it.
        self._left_by: dict[tuple[int, str], tuple[Execution, ...]] = {}
        self._flows: list[CrossingFlow] = []
        #: What forwards change and keep: its names, and who uses it.
        self._kept: list[tuple[set[str], set[str]]] = []

    def called(
        self, execution: Execution, caller: Execution, tensors: Iterable[torch.Tensor], why_whole: str | None = None
    ) -> None:
        """A module is called with these tensors: handing on a weight reads it where the call is made.

        Args:
            execution: The module that is called.
            caller: The one that calls it.
            tensors: Those among the arguments.
            why_whole: Why the call cannot go to another rank, if it cannot.
        """
        self._look(execution)
        if hooks_on(self._tree.by_path[execution.path].module) != self._hooks[execution.path]:
            self._own.setdefault((execution.path, "_forward_hooks"), set()).add(caller.path)
        self._executions[execution.path] += 1
        if why_whole is not None:
            self.join(caller.path, execution.path, why_whole)
        for tensor in tensors:
            entry = self._known.get(id(tensor))
            if entry is not None:
                self._read(tensor, entry, caller, "handed to a module")
                execution.given.add(id(tensor))

    def returned(self, execution: Execution, caller: Execution, tensors: Iterable[torch.Tensor]) -> None:
        """A module returns these tensors: a weight it holds, or was given, crosses ranks like any other result."""
        self._look(execution)
        for tensor in tensors:
            entry = self._known.get(id(tensor))
            if entry is not None:
                self._read(tensor, entry, execution, "returned")
                caller.given.add(id(tensor))

    def _look(self, execution: Execution) -> None:
        """At both ends of a call, which may leave the rank: other microbatches would find what is put back later."""
        for one in self._stack.executions:
            module, before = self._tree.by_path[one.path].module, self._children[one.path]
            for name in exchanged(module._modules, before) if module._modules != before else ():
                self._read_first.add((id(module), name))
                self._writes.setdefault((id(module), name), {one.path})
        self._shared.look((execution.path,))
        self._shared.look(running.path for running in self._stack.executions if running is not execution)

    def operation(self, func: Any, tensors: list[torch.Tensor]) -> None:
        """An operation runs on these tensors."""
        for tensor in tensors:
            entry = self._known.get(id(tensor))
            if entry is not None:
                self._read(tensor, entry, self._stack.top, str(func))
                index = self._buffers.get(id(tensor))
                self._used((id(tensor), "") if index is None else index, self._stack.top.path)

    def written_parameters(self, written: Iterable[torch.Tensor]) -> None:
        """The forward wrote to these tensors, or exchanged what is in them; parameters among them are kept state."""
        changed = {id(tensor) for tensor in written}
        for entry in self._tree.parameters:
            number = id(entry.tensor)
            before = self._weights[number]
            if number not in changed and before[1] == address(entry.tensor):
                continue
            self.keep(entry.names, {*entry.holders, *self._users.get((number, ""), ())})
            if before[0] == entry.tensor._version:  # torch would not notice that a backward needs the values before
                self.one_at_a_time(f"{entry.name} is written to past its version")

    def written(self, tensor: torch.Tensor) -> None:
        """An operation writes to this tensor."""
        self._shared.written(tensor)
        index = self._buffers.get(id(tensor))
        if index is not None:
            self._written_buffers.add(index)

    def _read(self, tensor: torch.Tensor, entry: TensorEntry, reader: Execution, how: str) -> None:
        if reader.path in entry.holders or id(tensor) in reader.given:
            return
        self.join(reader.path, entry.holders[0], f"computes with {entry.name} ({how})")

    def _keep(self, users: Iterable[str], what: str) -> None:
        scope = scope_of(users, self._executions)
        if scope is not None:
            self._flows.append(CrossingFlow(scope=scope, what=what))

    def flows(self) -> tuple[CrossingFlow, ...]:
        """State that executions hand on to others in shared objects, once `joins` has looked."""
        return tuple(self._flows)

    def _used(self, key: int | tuple[int, str], user: str) -> None:
        self._users.setdefault(key, set()).add(user)

    def keep(self, names: Iterable[str], users: Iterable[str]) -> None:
        """These modules use something that the forward changes."""
        self._kept.append((set(names), set(users)))

    def kept(self) -> tuple[KeptState, ...]:
        """Return what goes from one microbatch to the next, once `joins` has looked."""
        return merged(self._kept, self._executions)

    def one_at_a_time(self, what: str) -> None:
        """Microbatches have to run one after another, backward and all, as `what` says."""
        self._flows.append(CrossingFlow(scope="", what=what, meets_backward=True))

    def readers_of(self, attribute: tuple[int, str]) -> set[str]:
        """Who has used an attribute of a module, which may be a buffer, or of another object."""
        path = self._tree.path_of.get(attribute[0])
        index = None if path is None else self._tree.by_path[path].buffers.get(attribute[1])
        key = attribute if index is None else index
        return self._readers.get(attribute, set()) | self._users.get(key, set())

    def reads(self) -> dict[tuple[str, str], tuple[str, ...]]:
        """Return path and name of attributes that other modules than their own have read, with those modules."""
        paths = [(self._tree.path_of.get(module), name, users) for (module, name), users in self._readers.items()]
        return {(p, name): tuple(sorted(users - {p})) for p, name, users in paths if p is not None and users != {p}}

    def join(self, first: str, second: str, reason: str) -> None:
        """Keep two modules on one rank; the first reason counts."""
        if first != second:
            self._joins.setdefault((first, second), reason)

    @contextlib.contextmanager
    def watching_attributes(self) -> Iterator[None]:
        """Note reads and writes of module attributes, through the methods that all modules inherit."""
        set_attribute = nn.Module.__setattr__
        delete_attribute = nn.Module.__delattr__
        executions = self._stack.executions
        thread = self._stack.thread
        all_readers, left_by = self._readers, self._left_by

        def __getattribute__(module: nn.Module, name: str) -> Any:
            try:
                value = object.__getattribute__(module, name)
            except AttributeError:
                self._missed.add((id(module), name))
                if name in module.__dict__.get("_buffers", ()) and threading.get_ident() == thread:
                    self._buffer_looked_up(module, name)
                raise
            if name not in INTERNAL and type(value) is not types.MethodType and threading.get_ident() == thread:
                readers = all_readers.get((id(module), name))
                if readers is None:
                    all_readers[id(module), name] = {executions[-1].path}
                else:
                    readers.add(executions[-1].path)
                if (id(module), name) in left_by:
                    self._handed_on(module, name)
            return value

        def __setattr__(module: nn.Module, name: str, value: Any) -> None:
            if name == "training" and value is not module.training and self._stack.here():
                path = self._tree.path_of.get(id(module))
                if path is not None:
                    self._own.setdefault((path, name), set()).add(self._stack.top.path)
            is_child = isinstance(value, nn.Module) or name in module._modules
            set_attribute(module, name, value)
            self._attribute_written(module, name, is_child=is_child)

        def __delattr__(module: nn.Module, name: str) -> None:
            is_child = name in module._modules
            delete_attribute(module, name)
            self._attribute_written(module, name, is_child=is_child)

        def child_changes(module: nn.Module, name: str) -> None:
            self._attribute_written(module, name, is_child=True)

        def register_buffer(module: nn.Module, name: str, *args: Any, **kwargs: Any) -> None:
            original_of(register_buffer)(module, name, *args, **kwargs)
            self._attribute_written(module, name, is_child=False)

        functions = {own.__name__: own for own in (__getattribute__, __setattr__, __delattr__, register_buffer)}
        with replaced(nn.Module, functions), self._shared.watching(self._object_used), contextlib.ExitStack() as stack:
            for owner, name in ((nn.Module, "add_module"), *CONTAINER_METHODS):
                stack.enter_context(replaced(owner, {name: notifying(child_changes)}))
            yield

    def _buffer_looked_up(self, module: nn.Module, name: str) -> None:
        path = self._tree.path_of.get(id(module))
        index = None if path is None else self._tree.by_path[path].buffers.get(name)
        if index is not None:
            self._used(index, self._stack.top.path)
        elif path is not None:  # one that the forward itself has registered
            self._readers.setdefault((id(module), name), set()).add(self._stack.top.path)

    def _object_used(self, attribute: tuple[int, str]) -> None:
        if self._stack.here():
            self._used(attribute, self._stack.top.path)

    def _attribute_written(self, module: nn.Module, name: str, *, is_child: bool) -> None:
        path = self._tree.path_of.get(id(module))
        if path is None or name in INTERNAL or not self._stack.here():
            return
        writer = self._stack.top.path
        entry = self._tree.by_path[path]
        if name in entry.buffers:
            self._used(entry.buffers[name], writer)
        if name in entry.buffers or name in entry.parameters:
            if name in entry.buffers:
                self._written_buffers.add(entry.buffers[name])
            self.join(writer, path, f"sets {join_path(path, name)}")
            return
        key = (id(module), name)
        # Whether a child was read, or a method that the attribute stands for, is not seen.
        is_unseen = is_child or callable(getattr(type(module), name, None))
        if key not in self._writes and (is_unseen or key in self._readers or key in self._missed):
            self._read_first.add(key)
        if is_child:
            self.join(writer, path, f"sets {join_path(path, name)}")
        self._writes.setdefault(key, set()).add(writer)
        if next(module.parameters(), None) is None:
            self._left_by[key] = tuple(self._stack.executions)

    def _handed_on(self, module: nn.Module, name: str) -> None:
        """A module without parameters runs where it is called: its callers must be on one rank if it keeps state."""
        path = self._tree.path_of.get(id(module))
        writer = self._left_by[id(module), name]
        if path is None or writer[-1] is self._stack.top:
            return
        for stack in (writer, self._stack.executions):
            callers = [execution.path for execution in stack if execution.path != path]
            self.join(callers[-1], path, f"calls it, and it keeps {join_path(path, name)} from one call to another")

    def _find_unseen_sets(self) -> None:
        """Attributes that were set past ``__setattr__``: whoever reads them may have set them, and at any time."""
        for entry in self._tree.modules:
            before, now = self._before[id(entry.module)], vars(entry.module)
            for name in (before.keys() | now.keys()) - INTERNAL:
                key = (id(entry.module), name)
                if key not in self._writes and before.get(name, self) is not now.get(name, self):
                    self._writes[key] = set(self._readers.get(key, ())) or {entry.path}
                    self._read_first.add(key)

    def written_buffers(self) -> frozenset[str]:
        """Return names of the buffers that were written to or set."""
        return frozenset(self._tree.buffers[index].name for index in self._written_buffers)

    def attributes(self) -> dict[tuple[str, str], tuple[str, ...]]:
        """Return which modules set an attribute in the forward: path and name to the paths of those that do."""
        paths = self._tree.path_of
        seen = {(paths[m], name): tuple(sorted(w)) for (m, name), w in self._writes.items() if m in paths and w}
        return {attribute: tuple(sorted(users)) for attribute, users in self._own.items()} | seen

    def temporaries(self) -> frozenset[tuple[str, str]]:
        """Return path and name of the attributes that the forward set before anything read them."""
        paths, keys = self._tree.path_of, self._writes.keys() - self._read_first
        return frozenset((paths[module], name) for module, name in keys if module in paths)

    def joins(self) -> tuple[JoinReason, ...]:
        """Return what was seen, as pairs of modules with the first reason for each."""
        readers = self._readers
        self._written_buffers |= silently_written(self._tree, ((self._buffers[id(b)], b) for b in self._alive))
        self._find_unseen_sets()
        carried = self._writes.keys() & self._read_first
        for change in self._shared.changes():
            shown = min(join_path(self._tree.path_of.get(module, "?"), name) for module, name in change.held)
            for key in change.names:
                self._join_users(key, f"{shown}.{key[1]}")
                self.keep(self._names_of(change.held), self._users.get(key, ()))
            if change.names:
                continue
            # Whoever got hold of the container or object, by whichever module's attribute, may have changed it.
            users = {reader for attribute in change.held for reader in readers.get(attribute, ())}
            self._keep(users, f"{shown} changes in a forward")
            self.keep(self._names_of(change.held), users)
            for attribute in change.held:
                if attribute not in self._writes:
                    self._read_first.add(attribute)
                self._writes.setdefault(attribute, set()).update(users)
        for (path, name), users in self._own.items():
            holder, full_name = self._tree.by_path[path].module, join_path(path, name)
            if name == "training":
                is_put_back = holder.training is self._before[id(holder)]["training"]
            else:
                is_put_back = hooks_on(holder) == self._hooks[path]
                if not is_put_back and all(map(collects, hooks_on(holder))):
                    continue
            for user in users:
                self.join(user, path, f"sets {full_name}")
            if is_put_back:  # else every microbatch finds it as the first one left it
                self.keep([full_name], {*users, path})
        for variable, paths in self._shared.changed_variables().items():
            self._keep(paths, f"the global variable {variable} changes in a forward")
            self.keep([variable], paths)
            for path in paths[1:]:
                self.join(
                    paths[0], path, f"uses the global variable {variable} like the other, which a forward changes"
                )
        for (module, name), writers in self._writes.items():
            for writer in sorted(writers):
                for reader in sorted(readers.get((module, name), ())):
                    full_name = join_path(self._tree.path_of.get(module, "?"), name)
                    self.join(reader, writer, f"reads {full_name}, which the other sets in its forward")
        for index in sorted(self._written_buffers):
            self._joins.update(shared_buffer_joins(self._tree.buffers[index]))
            entry = self._tree.buffers[index]
            self.keep(entry.names, self._users.get(index) or entry.holders)
        self._keep_attributes(carried)
        self._keep_attributes(self._set_beside_state())
        return tuple(JoinReason(modules=pair, reason=reason) for pair, reason in sorted(self._joins.items()))

    def _keep_attributes(self, keys: Iterable[tuple[int, str]]) -> None:
        for key in keys:
            full_name = join_path(self._tree.path_of.get(key[0], "?"), key[1])
            self.keep([full_name], self._readers.get(key, set()) | self._writes[key])

    def _set_beside_state(self) -> set[tuple[int, str]]:
        """Attributes that were set before they were read, of modules that keep something else.

        What they keep may decide whether they set it, as where the first microbatch alone makes a value for all.
        """
        keeping = {user for _, users in self._kept for user in users if self._executions.get(user)}
        return {
            key
            for key, writers in self._writes.items()
            if key not in self._read_first and {*writers, *self._readers.get(key, ())} <= keeping
        }

    def _names_of(self, attributes: Iterable[tuple[int, str]]) -> list[str]:
        paths = self._tree.path_of
        return [join_path(paths[module], name) for module, name in attributes if module in paths]

    def _join_users(self, key: tuple[int, str], name: str) -> None:
        """Keep together who uses an attribute of a shared object that a forward changes."""
        first, *others = sorted(self._users[key])
        self._keep((first, *others), f"{name} changes in a forward")
        for other in others:
            self.join(first, other, f"uses {name} like the other, which a forward changes")
