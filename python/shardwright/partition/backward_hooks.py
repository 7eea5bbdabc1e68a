"""Finds what backward hooks of modules may change and a forward uses, by reading their code.

A hook runs on the rank of its module. A forward on another rank would not see what the hook changes: in its own module,
which it receives as an argument, in another module or object, or in a variable that its code encloses. No forward shows
these changes, so they are found from the objects that the code can reach and the names that it mentions. The hook's
module and the users of what it may change are kept on one rank.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwright.contents import INTERNAL
from shardwright.partition.audit import Audit
from shardwright.partition.reach import Reach, looks_at_first, may_act
from shardwright.partition.shared_state import AttributeKey, SharedState
from shardwright.partition.tree import ModelTree, ModuleEntry, join_path


def join_hooks(tree: ModelTree, audit: Audit, shared: SharedState) -> None:
    """Join modules with the users of what their backward hooks may change, and keep microbatches in order."""
    buffers = _Buffers(tree)
    hooked = [_Hooked(entry, hooks, buffers) for entry in tree.modules if (hooks := _backward_hooks(entry.module))]
    if not hooked:
        return
    used = _used_by_functions(tree, audit, buffers)
    for place, paths in shared.places():
        used.setdefault(place, set()).update(paths)

    def changed(path: str, users: set[str], change: _Change, *, is_held: bool) -> None:
        names = sorted(join_path(tree.path_of[module], name) for module, name in change.held) if is_held else []
        what = names[0] if names else change.what
        for user in sorted(users):
            audit.join(user, path, f"uses {what}, which a backward hook of the other may change")
        if names:
            audit.keep(names, {*users, path})
        if not names or change.is_unseen:
            audit.one_at_a_time(f"a backward hook of {path or 'the model'} may change {what}")

    for one in hooked:
        one.find_changes(tree, shared, buffers)
    by_code = _used_by_code(tree, buffers, {change.place for one in hooked for change in one.changes})
    for one in hooked:
        for change in one.changes:
            reading = set(by_code.get(change.place, ()))
            if change.attribute is not None:
                value, name = change.attribute
                users = reading = reading | audit.readers_of((id(value), name))
                is_there = isinstance(value, nn.Module) and (name in vars(value) or name in value._buffers)
                if is_there or users:
                    users = users | {tree.path_of[module] for module, _ in change.held}
                if users - {one.path}:
                    changed(one.path, users, change, is_held=True)
            elif change.is_made or not change.is_tensor:
                others = used.get(change.place, set())
                users = {user for attribute in change.held for user in audit.readers_of(attribute)}
                reading |= users | others
                if reading:
                    changed(one.path, reading, change, is_held=not others)
            one.acts |= bool(reading)
    for one, other in _from_hook_to_hook(hooked):
        for change in one.changes:
            if change.is_made and other.reach.uses(change.place):
                # Contents of a list or an object are not observed unless a forward uses them.
                is_held = change.attribute is not None and isinstance(change.attribute[0], nn.Module)
                changed(one.path, {other.path}, change, is_held=is_held)


class _Change(NamedTuple):
    """Something that a backward hook may change, with the attributes that lead to it and its description."""

    place: Hashable
    held: set[AttributeKey]
    what: str
    attribute: tuple[Any, str] | None = None
    #: Whether the code of the hook contains a change of this kind.
    is_made: bool = True
    is_tensor: bool = False
    #: Whether autograd does not detect the change.
    is_unseen: bool = False


class _Buffers:
    """The buffers of the trace, which replace the model's own."""

    def __init__(self, tree: ModelTree) -> None:
        #: By the id of the model's buffer, its replacement; and by the id of that, the attributes that hold it.
        self.instead: dict[int, torch.Tensor] = {}
        self.held: dict[int, set[AttributeKey]] = {}
        for entry in tree.modules:
            for name, index in entry.buffers.items():
                buffer = entry.module._buffers[name]
                if buffer is not None:
                    self.instead[id(tree.buffers[index].tensor)] = buffer
                    self.held.setdefault(id(buffer), set()).add((id(entry.module), name))


class _Hooked:
    """A module with backward hooks: what they may change, and whether they affect computed values."""

    def __init__(self, entry: ModuleEntry, hooks: list[Any], buffers: _Buffers) -> None:
        self.path = entry.path
        given = [entry.module] if any(map(looks_at_first, hooks)) else []
        self.reach = Reach(hooks, given, buffers.instead)
        self.acts = any(may_act(hook, self.reach) for hook in hooks)
        self.changes: list[_Change] = []

    def find_changes(self, tree: ModelTree, shared: SharedState, buffers: _Buffers) -> None:
        for value, name in self.reach.attributes():
            key = (id(value), name)
            held = {key} if id(value) in tree.path_of else shared.holders(id(value))
            self.changes.append(_Change(key, held, f"attribute {name} of a {type(value).__name__}", (value, name)))
        for place, what in self.reach.places():
            is_made = self.reach.mutates or place not in self.reach.objects
            is_tensor = isinstance(place, int) and isinstance(self.reach.objects.get(place), torch.Tensor)
            held = (buffers.held.get(place) or shared.holders(place)) if isinstance(place, int) else set()
            is_unseen = is_tensor and self.reach.passes_versions
            self.changes.append(_Change(place, held, what, is_made=is_made, is_tensor=is_tensor, is_unseen=is_unseen))


def _from_hook_to_hook(hooked: list[_Hooked]) -> Iterator[tuple[_Hooked, _Hooked]]:
    """Yield pairs of which the first changes what the second uses and the second affects computed values."""
    acting = [one for one in hooked if one.acts]
    for other in acting:  # grows during the iteration
        for one in hooked:
            if one is not other and any(change.is_made and other.reach.uses(change.place) for change in one.changes):
                if not one.acts:
                    one.acts = True
                    acting.append(one)
                yield one, other


def _backward_hooks(module: nn.Module) -> list[Any]:
    return [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]


def _used_by_code(tree: ModelTree, buffers: _Buffers, places: set[Hashable]) -> dict[Hashable, set[str]]:
    """Return, by place, the modules whose forward may use it, including branches that were not traced."""
    used: dict[Hashable, set[str]] = {}
    for entry in tree.modules if places else ():
        reach = Reach([type(entry.module).forward], [entry.module], buffers.instead)
        for place in places:
            if reach.uses(place):
                used.setdefault(place, set()).add(entry.path)
    return used


def _used_by_functions(tree: ModelTree, audit: Audit, buffers: _Buffers) -> dict[Hashable, set[str]]:
    """Return, by place, who uses it in a function that a module holds or in a hook of a module's forward."""
    used: dict[Hashable, set[str]] = {}
    for entry in tree.modules:
        module = entry.module
        found = [({entry.path}, [*module._forward_hooks.values(), *module._forward_pre_hooks.values()])]
        for name, value in vars(module).items():
            if name not in INTERNAL and isinstance(value, (types.FunctionType, functools.partial)):
                found.append((audit.readers_of((id(module), name)), [value]))
        for users, functions in found:
            if users and functions:
                reach = Reach(functions, instead=buffers.instead)
                for place in [*(place for place, _ in reach.places()), *reach.variables]:
                    used.setdefault(place, set()).update(users)
    return used
