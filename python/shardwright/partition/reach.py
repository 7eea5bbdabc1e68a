"""What functions can get hold of, change and use, as far as their code tells."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from shardwright.contents import FOREIGN, INTERNAL, kind_of
from shardwright.partition.variables import MISSING, codes_of, content_of

#: Code that reaches more objects is not looked through any further.
_MOST_OBJECTS = 2000
_STORES_ATTRIBUTES = ("STORE_ATTR", "DELETE_ATTR")
_STORES_VARIABLES = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF")
_SETTERS = frozenset({"setattr", "delattr", "__setattr__", "__dict__", "vars"})
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_WALKS = frozenset({"modules", "children", "named_modules", "named_children"})


class Reach:
    """What functions can get hold of: what they enclose or are given, and what lies behind the names in their code."""

    def __init__(self, functions: Iterable[Any], given: Iterable[Any] = ()) -> None:
        """Look through functions that are called with, among others, these arguments."""
        self.names: set[str] = set()
        #: Attributes that the code sets, and the variables that it uses or sets.
        self.stored: set[str] = set()
        self.variables: set[Hashable] = set()
        self._stored_variables: dict[Hashable, str] = {}
        self.objects: dict[int, Any] = {}
        self._functions: dict[int, types.FunctionType] = {}
        self._alive: list[Any] = []
        for value in (*functions, *given):
            self._add(value)
        known = -1
        while known != (known := len(self.names) + len(self.objects)) and known < _MOST_OBJECTS:
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
