"""Finds what functions can reach, change and use, from their code."""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwright.contents import FOREIGN, INTERNAL, kind_of
from shardwright.partition.variables import MISSING, codes_of, content_of, is_own

#: The search stops when code reaches more objects than this.
_MOST_OBJECTS = 2000
_LOADS_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
_SETTERS = frozenset({"setattr", "delattr", "__setattr__", "__dict__", "vars"})
_GETTERS = frozenset({"getattr", "hasattr", "__getattribute__", "attrgetter", "get_buffer", "get_submodule"})
_CLASS = frozenset({"type", "__class__"})
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_WALKS = frozenset({"modules", "children", "named_modules", "named_children"})


#: A lambda that consists of a call of one of these returns nothing.
_GIVE_NOTHING = frozenset(
    {"setattr", "delattr", "print", "append", "appendleft", "extend", "insert", "add", "update", "discard", "clear"}
    | {"__setattr__", "__delattr__", "__setitem__", "setitem", "info", "debug", "warning"}
)


#: Methods and functions that change a container, in addition to those whose name ends with an underscore.
_MUTATE = frozenset(
    {"append", "appendleft", "extend", "extendleft", "insert", "add", "update", "setdefault", "clear", "discard"}
    | {"pop", "popleft", "popitem", "remove", "reverse", "rotate", "sort", "subtract", "write"}
    | {"__setitem__", "__delitem__", "setitem", "delitem", "difference_update", "intersection_update"}
)
#: Names that give access to a tensor's values without a change of its version.
_PAST_VERSIONS = frozenset({"data", "numpy", "__array__", "storage", "untyped_storage", "set_", "from_dlpack"})


class _Code(NamedTuple):
    """Attributes that code loads and stores, variables that it stores, and whether it may return a value."""

    loaded: frozenset[str]
    stored: frozenset[str]
    globals: frozenset[str]
    cells: frozenset[str]
    returns: bool
    #: Whether it may change the contents of a container or tensor.
    mutates: bool


@functools.lru_cache(maxsize=4096)
def _read(code: types.CodeType) -> _Code:
    instructions = [each for each in dis.get_instructions(code) if each.opname != "CACHE"]

    def names(*operations: str) -> frozenset[str]:
        return frozenset(str(each.argval) for each in instructions if each.opname in operations)

    loaded, stored = names(*_LOADS_ATTRIBUTES), names("STORE_ATTR", "DELETE_ATTR")
    texts = {part for constant in code.co_consts for part in _texts_in(constant)}
    return _Code(
        loaded=loaded if _GETTERS.isdisjoint(code.co_names) else loaded | texts,
        stored=stored if _SETTERS.isdisjoint(code.co_names) else stored | texts,
        globals=names("STORE_GLOBAL", "DELETE_GLOBAL"),
        cells=names("STORE_DEREF", "DELETE_DEREF"),
        returns=_returns(code, instructions),
        mutates=any(each.opname in ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE") for each in instructions)
        or not _MUTATE.isdisjoint(code.co_names)
        or _writes_in_place(loaded)
        or "out" in texts
        or "data" in stored,
    )


def _texts_in(constant: Any) -> list[str]:
    parts = constant if isinstance(constant, tuple) else (constant,)  # a tuple may hold names of keyword arguments
    return [name for part in parts if isinstance(part, str) for name in part.split(".")]


def _writes_in_place(names: Iterable[str]) -> bool:
    """Return whether some of these are names of in-place methods of tensors."""
    return any(name.endswith("_") and not name.startswith("_") for name in names)


def _returns(code: types.CodeType, instructions: list[dis.Instruction]) -> bool:
    """Return whether the code may return anything but None."""
    if code.co_name == "<lambda>":
        begun = [each for each in instructions if each.opname.startswith("LOAD_")]
        names = [str(each.argval) for each in begun]
        length = next((n for n, each in enumerate(begun[1:], 1) if each.opname not in _LOADS_ATTRIBUTES), len(begun))
        if names and names[length - 1] in _GIVE_NOTHING:  # the function that it calls last
            return False
    before = None
    for each in instructions:
        if each.opname == "RETURN_CONST" and each.argval is not None:
            return True
        if each.opname == "RETURN_VALUE" and not (
            before is not None and before.opname == "LOAD_CONST" and before.argval is None
        ):
            return True
        before = each
    return False


class Reach:
    """Objects that functions can reach: enclosed values, arguments, and what the names in their code refer to."""

    def __init__(
        self, functions: Iterable[Any], given: Iterable[Any] = (), instead: Mapping[int, torch.Tensor] | None = None
    ) -> None:
        """Search the code of functions that are called with the `given` arguments, as far as these are known.

        `instead` has, by the id of a tensor, its replacement.
        """
        self._instead = instead or {}
        self.names: set[str] = set()
        #: Whether the code may change the contents of a container or tensor.
        self.mutates = False
        #: Attributes that the code reads and sets, and variables that it uses.
        self.loaded: set[str] = set()
        self.stored: set[str] = set()
        self.variables: set[Hashable] = set()
        self._stored_variables: dict[Hashable, str] = {}
        self.objects: dict[int, Any] = {}
        self._functions: dict[int, types.FunctionType] = {}
        self._classes: dict[int, type] = {}
        for value in (*functions, *given):
            self._add(value)
        known = -1
        while known != (known := len(self.names) + len(self.objects)) and known < _MOST_OBJECTS:
            for value in list(self.objects.values()):
                self._follow(value)

    def attributes(self) -> Iterator[tuple[Any, str]]:
        """Yield the attributes of modules and other objects that the code may set."""
        for value in self.objects.values():
            kind = kind_of(type(value))
            if isinstance(value, nn.Module) or (kind is not None and kind.has_names):
                yield from ((value, name) for name in sorted(self.stored - INTERNAL))

    @property
    def passes_versions(self) -> bool:
        """Whether the code may write to a tensor without a change of the tensor's version."""
        return self.mutates and not _PAST_VERSIONS.isdisjoint(self.names)

    def uses(self, place: Hashable) -> bool:
        """Return whether the code may use something that `attributes` or `places` of other code report as changed."""
        if place in self.variables or place in self.objects:
            return True
        if not isinstance(place, tuple) or place[1] not in self.loaded:
            return False
        kinds = {type(value) for value in self.objects.values()}
        return place[0] in self.objects or place[0] in {id(base) for kind in kinds for base in kind.__mro__}

    def _homes(self) -> Iterator[type]:
        """Yield the classes whose own attributes the code may use."""
        yield from self._classes.values()
        if not _CLASS.isdisjoint(self.names):
            for kind in {type(value) for value in self.objects.values()}:
                yield from (base for base in kind.__mro__ if is_own(base.__module__))

    def places(self) -> Iterator[tuple[Hashable, str]]:
        """Yield what the code may change apart from attributes, with a description."""
        for number, value in self.objects.items():
            kind = kind_of(type(value))
            if isinstance(value, torch.Tensor) or (kind is not None and kind.write is not None and not kind.has_names):
                yield number, f"a {type(value).__name__} that its code uses"
        yield from self._stored_variables.items()
        for home in self._homes():
            for name in sorted(self.stored & vars(home).keys()):
                yield (id(home), name), f"attribute {name} of class {home.__name__}"

    def _add(self, value: Any) -> None:
        if isinstance(value, types.FunctionType):
            self._add_function(value)
        elif isinstance(value, types.BuiltinFunctionType):
            self.mutates |= value.__name__ in _MUTATE
        elif isinstance(value, type):
            if is_own(value.__module__):
                self._classes[id(value)] = value
        elif isinstance(value, types.MethodType):
            self._add(value.__func__)
            self._add(value.__self__)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._add(part)
        elif isinstance(value, (nn.Module, torch.Tensor)) or kind_of(type(value)) is not None:
            value = self._instead.get(id(value), value)
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
            read = _read(code)
            self.mutates |= read.mutates
            self.loaded |= read.loaded
            self.stored |= read.stored
            self.names |= read.loaded | read.stored
            for name in read.globals:
                self._stored_variables[id(variables), name] = f"the global variable {name}"
            for name in read.cells & cells.keys():
                self._stored_variables[id(cells[name])] = f"the variable {name} of its code"

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


def may_act(function: Any, reach: Reach) -> bool:
    """Return whether a backward hook may change gradients: it may return a value, or write to what it reaches."""
    found, _ = _function_of(function)
    return found is None or _writes_in_place(reach.loaded) or _read(found.__code__).returns


def looks_at_first(function: Any) -> bool:
    """Return whether a callable uses its first argument."""
    function, index = _function_of(function)
    if function is None:
        return True
    code = function.__code__
    takes = index < code.co_argcount
    if not takes and not code.co_flags & inspect.CO_VARARGS:
        return False
    name = code.co_varnames[index if takes else code.co_argcount + code.co_kwonlyargcount]
    loaded = [each.argval for each in dis.get_instructions(code) if each.opname.startswith("LOAD_FAST")]
    return name in code.co_cellvars or any(name == one or (type(one) is tuple and name in one) for one in loaded)


def _function_of(value: Any) -> tuple[types.FunctionType | None, int]:
    """Return the function behind a callable, and the index of its parameter that receives the first argument."""
    given = 0
    while not isinstance(value, types.FunctionType):
        if isinstance(value, functools.partial):
            value, given = value.func, given + len(value.args)
        elif isinstance(value, types.MethodType):
            value, given = value.__func__, given + 1
        elif isinstance(called := getattr(type(value), "__call__", None), types.FunctionType):  # noqa: B004
            value, given = called, given + 1
        else:
            return None, 0
    return value, given
