"""Values that the code of modules reaches by name and that may hold state, such as global variables.

These are global variables of a function, variables of the script's own Python modules, attributes of its classes and
functions, values that functions enclose, and default arguments.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn

from shardwright.contents import FOREIGN, kind_of

_MAX_DEPTH = 4
#: The limits of the search for functions in containers: number of items, and depth.
_MAX_ITEMS, _MAX_LEVELS = 1024, 2
_NOT_IN_A_FORWARD = frozenset({"__init__", "__repr__", "extra_repr", "reset_parameters", "_init_weights"})
_STORES = tuple(dis.opmap[name] for name in ("STORE_GLOBAL", "DELETE_GLOBAL"))
_INSTALLED = ("site-packages", "dist-packages")
#: Types of class members that hold no state of their own.
_CODE = (types.FunctionType, property, classmethod, staticmethod, types.ModuleType, types.MemberDescriptorType)
MISSING: Any = object()


class Variable(NamedTuple):
    """A name and the holder of its value: a namespace, a class, or a cell of a function's closure."""

    holder: dict[str, Any] | type | types.CellType
    name: str

    def read(self) -> Any:
        """Return the current value; `MISSING` if there is none."""
        if isinstance(self.holder, types.CellType):
            return content_of(self.holder)
        return (self.holder if isinstance(self.holder, dict) else vars(self.holder)).get(self.name, MISSING)

    def write(self, value: Any) -> None:
        """Set the value; `MISSING` removes it."""
        if isinstance(self.holder, types.CellType):
            self.holder.cell_contents = value
        elif isinstance(self.holder, dict):
            if value is MISSING:
                self.holder.pop(self.name, None)
            else:
                self.holder[self.name] = value
        elif value is MISSING:
            delattr(self.holder, self.name)
        else:
            setattr(self.holder, self.name, value)


Found = Iterator[tuple[str, Variable]]


def variables_of(kind: type) -> Found:
    """Yield the variables that the methods of a class reach and that may hold state, with their full names."""
    seen: set[types.CodeType] = set()
    used: set[str] = set()
    bases = [base for base in kind.__mro__ if base not in (nn.Module, object)]
    bases = bases[: kind.__mro__.index(nn.Module)] if nn.Module in kind.__mro__ else bases
    for base in bases:
        for name, value in vars(base).items():
            function = getattr(value, "fget", None) or getattr(value, "__func__", value)
            if name not in _NOT_IN_A_FORWARD and isinstance(function, types.FunctionType):
                used.update(name for code in codes_of(function) for name in code.co_names)
                yield from _variables_in(function, seen, 0)
    for base in bases:
        held = (name for name, value in vars(base).items() if kind_of(type(value)) is not None)
        yield from _attributes_of(base, [*used, *held])


def _attributes_of(kind: type, used: Iterable[str]) -> Found:
    """Yield the attributes that code uses of one of the script's own classes."""
    if not is_own(kind.__module__):
        return
    own = vars(kind)
    names = dict.fromkeys(used)
    for method in [getattr(own.get(name), "__func__", own.get(name)) for name in names]:
        if isinstance(method, types.FunctionType):
            names.update(dict.fromkeys(name for code in codes_of(method) for name in code.co_names))
    for name in names:
        if name in own and not isinstance(own[name], (*_CODE, type)):
            yield f"{kind.__module__}.{kind.__qualname__}.{name}", Variable(kind, name)


@functools.lru_cache(maxsize=1024)
def is_own(module: str) -> bool:
    """Return whether a Python module belongs to the script, not to an installed package."""
    root = module.partition(".")[0]
    if root in FOREIGN or (root in sys.stdlib_module_names and root != "__main__"):
        return False
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    return not any(folder in file for folder in _INSTALLED)


def codes_of(function: types.FunctionType) -> list[types.CodeType]:
    """Return the code of a function and of the functions that it defines."""
    codes = [function.__code__]
    for code in codes:  # grows during the iteration
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return codes


def _variables_in(function: types.FunctionType, seen: set[types.CodeType], depth: int) -> Found:
    module = function.__module__ or ""
    if function.__code__ in seen or depth > _MAX_DEPTH or module.partition(".")[0] in FOREIGN:
        return
    yield from _own_of(function)
    for wrapped in (getattr(function, "__wrapped__", None), *(content_of(cell) for cell in function.__closure__ or ())):
        for inner in _functions_in(wrapped):
            yield from _variables_in(inner, seen, depth + 1)
    variables = function.__globals__
    for code in codes_of(function):
        seen.add(code)
        stored = _stored_by(code)
        for name in code.co_names:
            value = variables.get(name, MISSING)
            if value is MISSING and name not in stored:  # most such names are attributes
                continue
            for inner in _functions_in(value):
                yield from _variables_in(inner, seen, depth + 1)
            if isinstance(value, types.FunctionType):
                yield from _named(f"{module}.{name}", value.__dict__, code.co_names)
            elif isinstance(value, type):
                yield from _attributes_of(value, code.co_names)
            elif isinstance(value, types.ModuleType):
                yield from _in_module(value, code.co_names, seen, depth)
            elif name in stored or kind_of(type(value)) is not None:
                yield f"{module}.{name}", Variable(variables, name)


def _own_of(function: types.FunctionType) -> Found:
    """Yield the enclosed values and default arguments of one of the script's own functions."""
    if not is_own(function.__module__ or ""):
        return
    full_name = f"{function.__module__}.{function.__qualname__}"
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__" and not isinstance(content_of(cell), (*_CODE, type)):
            yield f"{full_name}.{name}", Variable(cell, name)
    for index, value in enumerate([*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]):
        if kind_of(type(value)) is not None:
            yield f"{full_name}.<default {index}>", Variable({"": value}, "")


def _in_module(home: types.ModuleType, used: Iterable[str], seen: set[types.CodeType], depth: int) -> Found:
    """Yield the variables that code uses of one of the script's own Python modules, and what its functions reach."""
    if not is_own(home.__name__):
        return
    for name in used:
        value = vars(home).get(name, MISSING)
        for inner in _functions_in(value):
            yield from _variables_in(inner, seen, depth + 1)
        if isinstance(value, type):
            yield from _attributes_of(value, used)
    yield from _named(home.__name__, vars(home), used)


def _named(path: str, namespace: dict[str, Any], used: Iterable[str]) -> Found:
    for name in used:
        if name in namespace and not isinstance(namespace[name], (*_CODE, type)):
            yield f"{path}.{name}", Variable(namespace, name)


def content_of(cell: types.CellType) -> Any:
    """Return the content of a closure cell; `MISSING` if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return MISSING


def _functions_in(value: Any, depth: int = 0) -> Iterator[types.FunctionType]:
    """Yield the functions that a value is or contains, including the methods of a context manager."""
    if isinstance(value, types.FunctionType):
        yield value
    elif isinstance(value, functools.partial):
        yield from _functions_in(value.func, depth)
    elif isinstance(value, type):
        if hasattr(value, "__enter__") and not issubclass(value, nn.Module):
            yield from (item for item in vars(value).values() if isinstance(item, types.FunctionType))
    elif depth < _MAX_LEVELS and type(value) in (dict, list, tuple) and len(value) <= _MAX_ITEMS:
        for item in list(value.values()) if type(value) is dict else value:
            yield from _functions_in(item, depth + 1)


def _stored_by(code: types.CodeType) -> set[str]:
    operations = code.co_code[::2]
    if not any(operation in operations for operation in _STORES):
        return set()
    return {str(instruction.argval) for instruction in dis.get_instructions(code) if instruction.opcode in _STORES}
