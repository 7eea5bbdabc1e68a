"""The global variables that the code of modules uses, and that may hold state."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from shardwright.contents import FOREIGN, kind_of

_DEEPEST = 4
#: Functions in containers with more items, or deeper in them, are not looked for.
_MOST_ITEMS, _MOST_LEVELS = 1024, 2
_NOT_IN_A_FORWARD = frozenset({"__init__", "__repr__", "extra_repr", "reset_parameters", "_init_weights"})
_STORES = tuple(dis.opmap[name] for name in ("STORE_GLOBAL", "DELETE_GLOBAL"))
_MISSING = object()


def variables_of(kind: type) -> Iterator[tuple[str, tuple[dict[str, Any], str]]]:
    """The global variables that may hold state among those that the methods of a module's class use."""
    seen: set[types.CodeType] = set()
    for base in kind.__mro__:
        if base is nn.Module:
            break
        for name, value in vars(base).items():
            if name in _NOT_IN_A_FORWARD:
                continue
            function = getattr(value, "__func__", value)
            if isinstance(function, types.FunctionType):
                yield from _variables_in(function, seen, 0)


def _variables_in(
    function: types.FunctionType, seen: set[types.CodeType], depth: int
) -> Iterator[tuple[str, tuple[dict[str, Any], str]]]:
    if function.__code__ in seen or depth > _DEEPEST or (function.__module__ or "").partition(".")[0] in FOREIGN:
        return
    for wrapped in (getattr(function, "__wrapped__", None), *(_content(cell) for cell in function.__closure__ or ())):
        for inner in _functions_in(wrapped):
            yield from _variables_in(inner, seen, depth + 1)
    variables = function.__globals__
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        seen.add(code)
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        stored = _stored_by(code)
        for name in code.co_names:
            value = variables.get(name, _MISSING)
            if value is _MISSING and name not in stored:  # most are names of attributes
                continue
            for inner in _functions_in(value):
                yield from _variables_in(inner, seen, depth + 1)
            if isinstance(value, types.FunctionType):
                continue
            if name in stored or kind_of(type(value)) is not None:
                yield f"{function.__module__}.{name}", (variables, name)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None


def _functions_in(value: Any, depth: int = 0) -> Iterator[types.FunctionType]:
    """The functions that a value is or holds, and the methods of a context manager: what code that has it may run."""
    if isinstance(value, types.FunctionType):
        yield value
    elif isinstance(value, functools.partial):
        yield from _functions_in(value.func, depth)
    elif isinstance(value, type):
        if hasattr(value, "__enter__") and not issubclass(value, nn.Module):
            yield from (item for item in vars(value).values() if isinstance(item, types.FunctionType))
    elif depth < _MOST_LEVELS and type(value) in (dict, list, tuple) and len(value) <= _MOST_ITEMS:
        for item in list(value.values()) if type(value) is dict else value:
            yield from _functions_in(item, depth + 1)


def _stored_by(code: types.CodeType) -> set[str]:
    operations = code.co_code[::2]
    if not any(operation in operations for operation in _STORES):
        return set()
    return {str(instruction.argval) for instruction in dis.get_instructions(code) if instruction.opcode in _STORES}
