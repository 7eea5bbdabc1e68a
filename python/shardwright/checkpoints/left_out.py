"""What a checkpoint does not have since it was no data: told when it is saved, and when it is asked for later."""

from __future__ import annotations

import argparse
import types
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from shardwright.errors import LeftOutError, UnsupportedValueError
from shardwright.job.runtime import Runtime, find_runtime
from shardwright.logs import logger

_MAX_LISTED = 10


class NotDataError(UnsupportedValueError):
    """A value cannot be saved.

    Attributes:
        path: What the value is called.
        what: What it is, such as ``a torch.nn.modules.linear.Linear``.
        hint: What to save in its place, after a semicolon; or nothing.
    """

    def __init__(self, path: str, what: str, hint: str = "", allowed: str = "") -> None:
        """Create the error; ``allowed`` says what can be saved."""
        super().__init__(f"{path} is {what}, which cannot be saved{hint}{allowed}", what)
        self.path, self.what, self.hint = path, what, hint


class LeftOutKeyError(LeftOutError, KeyError):
    """An entry of a dict was left out."""

    __str__ = LeftOutError.__str__


class LeftOutAttributeError(LeftOutError, AttributeError):
    """An attribute, or what has the attribute, was left out."""


class LeftOut:
    """Stands where a value was left out that has a position, such as an item of a list; whatever uses it raises.

    Raises:
        LeftOutError: It is used.
    """

    def __init__(self, path: str, what: str, hint: str) -> None:
        """Remember what was left out; see :class:`NotDataError`."""
        self.__dict__.update(record=[path, what, hint])

    def text(self) -> str:
        """What the errors say."""
        path, what, hint = self.__dict__["record"]
        return f"{path} is not there: when it was saved, it was {what}, which is not data and was left out{hint}"

    def __repr__(self) -> str:
        """The value that was left out."""
        return f"<left out: {self.__dict__['record'][1]}>"

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse."""
        if name.startswith("__"):  # Python asks for these, as when it copies
            raise AttributeError(name)
        raise LeftOutAttributeError(self.text())

    __hash__ = object.__hash__


def _refuse(self: LeftOut, *_: object) -> NoReturn:
    raise LeftOutError(self.text())


for _name in (
    *("call", "getitem", "setitem", "delitem", "iter", "next", "len", "contains", "bool", "enter", "exit", "fspath"),
    *("eq", "ne", "lt", "le", "gt", "ge", "int", "float", "index", "complex", "neg", "abs", "setattr"),
    *(
        side + name
        for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or")
        for side in ["r", ""]
    ),
):
    setattr(LeftOut, f"__{_name}__", _refuse)


class _Mapping:
    """Of dicts without some of their entries."""

    left_out: dict[Any, LeftOut]

    def __missing__(self, key: Any) -> NoReturn:
        if key in self.left_out:
            raise LeftOutKeyError(self.left_out[key].text())
        raise KeyError(key)


class DictWithout(_Mapping, dict[Any, Any]):
    """A dict without some of its entries, which says so when it is asked for one of them."""


class OrderedDictWithout(_Mapping, OrderedDict[Any, Any]):
    """The same, ordered."""


class _Attributes:
    """Of namespaces without some of their attributes."""

    __slots__ = ()

    def __getattr__(self, name: str) -> NoReturn:
        left_out: dict[str, LeftOut] = {} if name == "left_out" else self.left_out
        if name in left_out:
            raise LeftOutAttributeError(left_out[name].text())
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        """As what it is made of, for copies."""
        return made, (KINDS[type(self)], dict(vars(self)), self.left_out)


class NamespaceWithout(_Attributes, argparse.Namespace):
    """A namespace without some of its attributes, which says so when it is asked for one of them."""

    __slots__ = ("left_out",)


class SimpleNamespaceWithout(_Attributes, types.SimpleNamespace):
    """The same of ``types.SimpleNamespace``."""

    __slots__ = ("left_out",)


#: The class of what lacks something, and of what lacks nothing.
KINDS: dict[type, type] = {
    DictWithout: dict,
    OrderedDictWithout: OrderedDict,
    NamespaceWithout: argparse.Namespace,
    SimpleNamespaceWithout: types.SimpleNamespace,
}
_WITHOUT = {whole: without for without, whole in KINDS.items()}


def made(kind: type, items: Mapping[Any, Any], left_out: dict[Any, LeftOut]) -> Any:
    """Return a dict or a namespace with items, which says what it lacks.

    Args:
        kind: The class of one that lacks nothing.
        items: The items.
        left_out: What it lacks.
    """
    whole = kind(items) if issubclass(kind, dict) else kind(**items)
    if not left_out:
        return whole
    found = _WITHOUT[kind](items) if issubclass(kind, dict) else _WITHOUT[kind](**items)
    found.left_out = left_out
    return found


class Said:
    """What this rank has been told of its saves."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.paths: set[tuple[str, str]] = set()


def tell_left_out(operation: str, errors: Sequence[NotDataError]) -> None:
    """Say once what a save leaves out.

    Args:
        operation: The call.
        errors: Why each value is left out.
    """
    new = _new([(each.path, each.what) for each in errors])
    if new:
        named = [f"{each.path} ({each.what}{each.hint})" for each in errors if (each.path, each.what) in new]
        _log(
            "%s leaves out what is not data: %s. The rest is saved. Whoever asks for it after loading gets an error "
            "that says so",
            operation,
            _listed(named),
        )


def tell_plain(operation: str, plain: Sequence[Sequence[str]]) -> None:
    """Say once what comes back as something simpler than it is.

    Args:
        operation: The call.
        plain: For each value what it is called, what it is, and what comes back.
    """
    new = _new([(path, what) for path, what, _ in plain])
    if new:
        named = [f"{path} ({what}) as {becomes}" for path, what, becomes in plain if (path, what) in new]
        _log("%s: files have plain data and no classes of scripts: %s", operation, _listed(named))


def _listed(named: Sequence[str]) -> str:
    more = f", and {len(named) - _MAX_LISTED} more" if len(named) > _MAX_LISTED else ""
    return ", ".join(named[:_MAX_LISTED]) + more


def _new(paths: list[tuple[str, str]]) -> set[tuple[str, str]]:
    runtime = find_runtime()
    if runtime is None:
        return {*paths}
    known = _said(runtime).paths
    new = {*paths} - known
    known |= new
    return new


def _said(runtime: Runtime) -> Said:
    found = runtime.find(Said)
    return runtime.add(Said()) if found is None else found


def _log(text: str, *args: str) -> None:
    runtime = find_runtime()
    (logger.warning if runtime is None or runtime.place.rank == 0 else logger.info)(text, *args)
