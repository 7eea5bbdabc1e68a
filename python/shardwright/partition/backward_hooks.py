"""What backward hooks of modules may change that a forward uses: no forward shows it, so their code is read.

A hook runs on the rank of its module. What it changes there, of another module, of an object or in a variable that its
code encloses, a forward on another rank would not see. So it is found by what the code can get hold of and the names
that it mentions, and kept on one rank with who uses it.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwright.contents import FOREIGN, INTERNAL, kind_of
from shardwright.partition.shared_state import AttributeKey, SharedState
from shardwright.partition.tree import ModelTree, join_path
from shardwright.partition.variables import MISSING, codes_of, content_of

if TYPE_CHECKING:
    from shardwright.partition.audit import Audit

#: Code that reaches more objects is not looked through any further.
_MAX_OBJECTS = 2000
_STORES_ATTRIBUTES = ("STORE_ATTR", "DELETE_ATTR")
_STORES_VARIABLES = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF")
_SETTERS = frozenset({"setattr", "delattr", "__setattr__", "__dict__", "vars"})
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_WALKS = frozenset({"modules", "children", "named_modules", "named_children"})


def join_hooks(tree: ModelTree, audit: Audit, shared: SharedState) -> None:
    """Keep modules on one rank with those that use what their backward hooks may change, and microbatches in order.

    Args:
        tree: The model.
        audit: Knows who used what in a forward.
        shared: Objects and variables that modules use.
    """
    hooked = [(entry.path, hooks) for entry in tree.modules if (hooks := _backward_hooks(entry.module))]
    if not hooked:
        return
    used = _used_by_functions(tree, audit)
    for place, users in shared.places():
        used.setdefault(place, set()).update(users)

    def changes(path: str, users: set[str], held: Iterable[AttributeKey], what: str) -> None:
        names = sorted(join_path(tree.path_of[module], name) for module, name in held)
        what = names[0] if names else what
        for user in sorted(users):
            audit.join(user, path, f"uses {what}, which a backward hook of the other may change")
        if names:
            audit.keep(names, {*users, path})
        else:  # which no backward is seen to change
            audit.one_at_a_time(f"a backward hook of {path or 'the model'} may change {what}")

    for path, hooks in hooked:
        reach = _Reach(hooks)
        for value, name in reach.attributes():
            holder = tree.path_of.get(id(value))
            held = shared.holders(id(value)) if holder is None else {(id(value), name)}
            users = audit.readers_of((id(value), name))
            if holder is not None and (name in vars(value) or name in value._buffers):
                users |= {holder}
            elif users:
                users |= {tree.path_of[module] for module, _ in held}
            if users - {path}:
                changes(path, users, held, f"attribute {name} of a {type(value).__name__}")
        for place, what in reach.places():
            held = shared.holders(place) if isinstance(place, int) else set()
            users = {user for attribute in held for user in audit.readers_of(attribute)}
            others = used.get(place, set())
            if users | others:
                changes(path, users | others, () if others else held, what)


def _backward_hooks(module: nn.Module) -> list[Any]:
    return [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]


def _used_by_functions(tree: ModelTree, audit: Audit) -> dict[Hashable, set[str]]:
    """By place, who uses it in a function that a module holds or that is a hook of its forward."""
    used: dict[Hashable, set[str]] = {}
    for entry in tree.modules:
        module = entry.module
        found = [({entry.path}, [*module._forward_hooks.values(), *module._forward_pre_hooks.values()])]
        for name, value in vars(module).items():
            if name not in INTERNAL and isinstance(value, (types.FunctionType, functools.partial)):
                found.append((audit.readers_of((id(module), name)), [value]))
        for users, functions in found:
            if users and functions:
                reach = _Reach(functions)
                for place in [*(place for place, _ in reach.places()), *reach.variables]:
                    used.setdefault(place, set()).update(users)
    return used


class _Reach:
    """What functions can get hold of: what they enclose or are given, and what lies behind the names in their code."""

    def __init__(self, functions: Iterable[Any]) -> None:
        self.names: set[str] = set()
        #: Attributes that the code sets, and the variables that it uses or sets.
        self.stored: set[str] = set()
        self.variables: set[Hashable] = set()
        self._stored_variables: dict[Hashable, str] = {}
        self.objects: dict[int, Any] = {}
        self._functions: dict[int, types.FunctionType] = {}
        self._alive: list[Any] = []
        for function in functions:
            self._add(function)
        known = -1
        while known != (known := len(self.names) + len(self.objects)) and known < _MAX_OBJECTS:
            for value in list(self.objects.values()):
                self._follow(value)

    def attributes(self) -> Iterator[tuple[Any, str]]:
        """Attributes of modules and other objects that the code may set."""
        for value in self.objects.values():
            kind = kind_of(type(value))
            if isinstance(value, nn.Module) or (kind is not None and kind.has_names):
                yield from ((value, name) for name in sorted(self.stored - INTERNAL))

    def places(self) -> Iterator[tuple[Hashable, str]]:
        """What the code may change apart from attributes, with words for it."""
        for number, value in self.objects.items():
            kind = kind_of(type(value))
            if isinstance(value, torch.Tensor) or (kind is not None and kind.write is not None and not kind.has_names):
                yield number, f"a {type(value).__name__} that its code uses"
        yield from self._stored_variables.items()

    def _add(self, value: Any) -> None:
        if isinstance(value, types.FunctionType):
            self._add_function(value)
        elif isinstance(value, types.MethodType):
            self._add(value.__func__)
            self._add(value.__self__)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._add(part)
        elif isinstance(value, (nn.Module, torch.Tensor)) or kind_of(type(value)) is not None:
            if id(value) in self.objects or isinstance(value, nn.Parameter):
                return
            self.objects[id(value)] = value
            if callable(value) and not isinstance(value, nn.Module):
                self._add(type(value).__call__)

    def _add_function(self, function: types.FunctionType) -> None:
        if id(function) in self._functions or (function.__module__ or "").partition(".")[0] in FOREIGN:
            return
        self._functions[id(function)] = function
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for value in (*map(content_of, cells.values()), *(function.__defaults__ or ())):
            self._add(value)
        for value in (function.__kwdefaults__ or {}).values():
            self._add(value)
        variables = function.__globals__
        self.variables.update(map(id, cells.values()))
        for code in codes_of(function):
            self.names.update(code.co_names)
            for name in code.co_names:
                if name in variables:
                    self.variables.add((id(variables), name))
                    self._add(variables[name])
            for instruction in dis.get_instructions(code):
                name = str(instruction.argval)
                if instruction.opname in _STORES_ATTRIBUTES:
                    self.stored.add(name)
                elif instruction.opname in _STORES_VARIABLES:
                    if "GLOBAL" in instruction.opname:
                        self._stored_variables[id(variables), name] = f"the global variable {name}"
                    elif name in cells:
                        self._stored_variables[id(cells[name])] = f"the variable {name} of its code"
            if not _SETTERS.isdisjoint(code.co_names):
                texts = {constant for constant in code.co_consts if isinstance(constant, str)}
                self.stored |= texts
                self.names |= texts

    def _follow(self, value: Any) -> None:
        kind = kind_of(type(value))
        if isinstance(value, nn.Module):
            every = isinstance(value, _LISTS) or not _WALKS.isdisjoint(self.names)
            for name, child in value._modules.items():
                if every or name in self.names:
                    self._add(child)
            held = {**vars(value), **value._buffers}
            self._follow_names(type(value), {name: item for name, item in held.items() if name not in INTERNAL})
        elif kind is not None and kind.has_names:
            self._follow_names(type(value), kind.read(value))
        elif kind is not None:
            for part in kind.parts(kind.read(value)):
                self._add(part)

    def _follow_names(self, kind: type, held: dict[str, Any]) -> None:
        for name in list(self.names):
            if name in held:
                self._add(held[name])
            else:
                method = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), MISSING)
                for function in (method, *(getattr(method, part, None) for part in ("__func__", "fget", "fset"))):
                    if isinstance(function, types.FunctionType):
                        self._add(function)
