"""Finds modules that must share a rank because one reads what another holds or writes.

Parameters and buffers are on one rank, and an attribute that a forward sets is visible only on the rank that set it. A
module that computes with another's weight, or reads an attribute that another one wrote, is therefore joined with it.
Reading a dtype or a shape needs no join, because sentinels provide them.
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
from shardwright.partition.decision import JoinReason
from shardwright.partition.flows import CrossingFlow, merged, scope_of
from shardwright.partition.observe import Execution, Stack
from shardwright.partition.shared_state import SharedState
from shardwright.partition.structure import shared_buffer_joins
from shardwright.partition.tree import ModelTree, TensorEntry, address, hooks_on, join_path
from shardwright.partition.unversioned import silently_written
from shardwright.patches import original_of, replaced
from shardwright.transformers_models.collector import collects


class Audit:
    """Collects joins during one forward of a model.

    Create it while the model runs with the buffers of the trace, because it identifies buffers by identity.
    """

    def __init__(self, tree: ModelTree, stack: Stack, shared: SharedState) -> None:
        """Register every parameter and buffer of the model by identity."""
        self._tree = tree
        self._stack = stack
        self._joins: dict[tuple[str, str], str] = {}
        self._known: dict[int, TensorEntry] = {id(entry.tensor): entry for entry in tree.parameters}
        #: By id, the version of each parameter and the address of its values.
        self._weights = {id(entry.tensor): (entry.tensor._version, address(entry.tensor)) for entry in tree.parameters}
        self._buffers: dict[int, int] = {}
        # A forward may replace a buffer by another tensor. The id of the first one must not be reused.
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
        #: Modules that change hooks or the training flag of a module, by its path and the name of the attribute.
        self._own: dict[tuple[str, str], set[str]] = {}
        self._hooks = {entry.path: hooks_on(entry.module) for entry in tree.modules}
        self._readers: dict[tuple[int, str], set[str]] = {}
        self._missed: set[tuple[int, str]] = set()
        #: Users of buffers, by index, and of attributes of modules and other objects, by id and name.
        self._users: dict[int | tuple[int, str], set[str]] = {}
        self._writes: dict[tuple[int, str], set[str]] = {}
        self._read_first: set[tuple[int, str]] = set()
        self._shared = shared
        self._executions: Counter[str] = Counter()
        #: The executions around the last write to an attribute of a module without parameters.
        self._left_by: dict[tuple[int, str], tuple[Execution, ...]] = {}
        self._flows: list[CrossingFlow] = []
        #: State that forwards change and keep: its names, and its users.
        self._kept: list[tuple[set[str], set[str]]] = []

    def called(
        self, execution: Execution, caller: Execution, tensors: Iterable[torch.Tensor], why_whole: str | None = None
    ) -> None:
        """Record a call with some tensors as arguments, and why it cannot go to another rank, if so.

        Passing a weight as an argument counts as reading it in the caller.
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
        """Record the results of a module. A returned weight crosses ranks like any other result."""
        self._look(execution)
        for tensor in tensors:
            entry = self._known.get(id(tensor))
            if entry is not None:
                self._read(tensor, entry, execution, "returned")
                caller.given.add(id(tensor))

    def _look(self, execution: Execution) -> None:
        """Compare state at the start or end of a call, where other microbatches would see temporary changes."""
        for one in self._stack.executions:
            module, before = self._tree.by_path[one.path].module, self._children[one.path]
            for name in exchanged(module._modules, before) if module._modules != before else ():
                self._read_first.add((id(module), name))
                self._writes.setdefault((id(module), name), {one.path})
        self._shared.look((execution.path,))
        self._shared.look(running.path for running in self._stack.executions if running is not execution)

    def operation(self, func: Any, tensors: list[torch.Tensor]) -> None:
        """Record an operation on these tensors."""
        for tensor in tensors:
            entry = self._known.get(id(tensor))
            if entry is not None:
                self._read(tensor, entry, self._stack.top, str(func))
                index = self._buffers.get(id(tensor))
                self._used((id(tensor), "") if index is None else index, self._stack.top.path)

    def written_parameters(self, written: Iterable[torch.Tensor]) -> None:
        """Record parameters that the forward wrote to, or whose values it replaced, as kept state."""
        changed = {id(tensor) for tensor in written}
        for entry in self._tree.parameters:
            number = id(entry.tensor)
            before = self._weights[number]
            if number not in changed and before[1] == address(entry.tensor):
                continue
            self.keep(entry.names, {*entry.holders, *self._users.get((number, ""), ())})
            if before[0] == entry.tensor._version:  # autograd would not detect that the backward needs the old values
                self.one_at_a_time(f"{entry.name} is written to past its version")

    def written(self, tensor: torch.Tensor) -> None:
        """Record an operation that writes to this tensor."""
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
        """Return the state that executions pass to others in shared objects. Call `joins` first."""
        return tuple(self._flows)

    def _used(self, key: int | tuple[int, str], user: str) -> None:
        self._users.setdefault(key, set()).add(user)

    def keep(self, names: Iterable[str], users: Iterable[str]) -> None:
        """Record that these modules use state that the forward changes."""
        self._kept.append((set(names), set(users)))

    def kept(self) -> tuple[KeptState, ...]:
        """Return the state that is carried from one microbatch to the next. Call `joins` first."""
        return merged(self._kept, self._executions)

    def one_at_a_time(self, what: str) -> None:
        """Record that microbatches must run one after another, backward included, because of `what`."""
        self._flows.append(CrossingFlow(scope="", what=what, meets_backward=True))

    def readers_of(self, attribute: tuple[int, str]) -> set[str]:
        """Return the users of an attribute of an object. The attribute may be a buffer of a module."""
        path = self._tree.path_of.get(attribute[0])
        index = None if path is None else self._tree.by_path[path].buffers.get(attribute[1])
        key = attribute if index is None else index
        return self._readers.get(attribute, set()) | self._users.get(key, set())

    def reads(self) -> dict[tuple[str, str], tuple[str, ...]]:
        """Return, by path and name, the attributes that other modules read, with the paths of those modules."""
        paths = [(self._tree.path_of.get(module), name, users) for (module, name), users in self._readers.items()]
        return {(p, name): tuple(sorted(users - {p})) for p, name, users in paths if p is not None and users != {p}}

    def join(self, first: str, second: str, reason: str) -> None:
        """Keep two modules on one rank. Only the first reason of a pair is kept."""
        if first != second:
            self._joins.setdefault((first, second), reason)

    @contextlib.contextmanager
    def watching_attributes(self) -> Iterator[None]:
        """Record reads and writes of module attributes, by replacing methods that all modules inherit."""
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
        elif path is not None:  # a buffer that the forward has registered
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
        # Reads of children, and of attributes that are also methods, are not observed.
        is_unseen = is_child or callable(getattr(type(module), name, None))
        if key not in self._writes and (is_unseen or key in self._readers or key in self._missed):
            self._read_first.add(key)
        if is_child:
            self.join(writer, path, f"sets {join_path(path, name)}")
        self._writes.setdefault(key, set()).add(writer)
        if next(module.parameters(), None) is None:
            self._left_by[key] = tuple(self._stack.executions)

    def _handed_on(self, module: nn.Module, name: str) -> None:
        """Join the callers of a module without parameters that keeps state, because it runs where it is called."""
        path = self._tree.path_of.get(id(module))
        writer = self._left_by[id(module), name]
        if path is None or writer[-1] is self._stack.top:
            return
        for stack in (writer, self._stack.executions):
            callers = [execution.path for execution in stack if execution.path != path]
            self.join(callers[-1], path, f"calls it, and it keeps {join_path(path, name)} from one call to another")

    def _find_unseen_sets(self) -> None:
        """Find attributes set without ``__setattr__``. Any of their readers may have set them, at any time."""
        for entry in self._tree.modules:
            before, now = self._before[id(entry.module)], vars(entry.module)
            for name in (before.keys() | now.keys()) - INTERNAL:
                key = (id(entry.module), name)
                if key not in self._writes and before.get(name, self) is not now.get(name, self):
                    self._writes[key] = set(self._readers.get(key, ())) or {entry.path}
                    self._read_first.add(key)

    def written_buffers(self) -> frozenset[str]:
        """Return the names of the buffers that were written to or set."""
        return frozenset(self._tree.buffers[index].name for index in self._written_buffers)

    def attributes(self) -> dict[tuple[str, str], tuple[str, ...]]:
        """Return, by path and name, the attributes that the forward set, with the paths of the modules that did."""
        paths = self._tree.path_of
        seen = {(paths[m], name): tuple(sorted(w)) for (m, name), w in self._writes.items() if m in paths and w}
        return {attribute: tuple(sorted(users)) for attribute, users in self._own.items()} | seen

    def temporaries(self) -> frozenset[tuple[str, str]]:
        """Return the paths and names of the attributes that the forward set before anything read them."""
        paths, keys = self._tree.path_of, self._writes.keys() - self._read_first
        return frozenset((paths[module], name) for module, name in keys if module in paths)

    def joins(self) -> tuple[JoinReason, ...]:
        """Return the joins, as pairs of modules with the first reason for each."""
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
            # Any module that read the container or object, through any attribute, may have changed it.
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
            if is_put_back:  # otherwise every microbatch finds the state that the first one left
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
        """Return attributes set before they are read whose users all keep other state.

        That state may determine whether they are set, for example if only the first microbatch computes a value for
        all.
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
        """Join the users of an attribute of a shared object that a forward changes."""
        first, *others = sorted(self._users[key])
        self._keep((first, *others), f"{name} changes in a forward")
        for other in others:
            self.join(first, other, f"uses {name} like the other, which a forward changes")
