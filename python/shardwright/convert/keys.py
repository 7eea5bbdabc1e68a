"""What becomes of a key: in the table that the command prints, and in the guide's."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from shardwright.convert.plan import Plan
from shardwright.convert.values import is_given, is_off


class Outcome(enum.Enum):
    """What becomes of a key."""

    BECOMES = "becomes"
    NOT_NEEDED = "not needed"
    NO_COUNTERPART = "no counterpart"


Told = tuple[Outcome, str]
Read = Callable[[Plan, Any], Told]


@dataclass(frozen=True)
class Row:
    """A key of a file, and what became of it."""

    key: str
    value: Any
    outcome: Outcome
    text: str


@dataclass(frozen=True)
class Key:
    """A key that is known.

    Args:
        names: Its name, and others that mean the same.
        guide: What becomes of it, for the guide.
        read: Returns what becomes of a value, of the plan that was made of all keys.
    """

    names: tuple[str, ...]
    guide: str
    read: Read


def becomes(text: str) -> Told:
    """Say what stands for it."""
    return Outcome.BECOMES, text


def drop(text: str) -> Told:
    """Say why nothing has to stand for it."""
    return Outcome.NOT_NEEDED, text


def lack(text: str) -> Told:
    """Say why nothing stands for it."""
    return Outcome.NO_COUNTERPART, text


def key(names: str, guide: str, read: Read) -> Key:
    """Make a key of its names, with blanks between them."""
    return Key(tuple(names.split()), guide, read)


def not_needed(names: str, why: str) -> Key:
    """Make a key that changes neither results nor what fits in memory."""
    return Key(tuple(names.split()), f"not needed: {why}", lambda plan, value: drop(why))


def lacking(names: str, why: str, unless: Iterable[Any] = ()) -> Key:
    """Make a key that has no counterpart, unless it is off or one of the given values."""
    harmless = list(unless)

    def read(plan: Plan, value: Any) -> Told:
        if is_off(value):
            return drop("it is off")
        return drop("it asks for nothing") if value in harmless else lack(why)

    but = "".join(f" or `{value}`" for value in dict.fromkeys(map(str, harmless)))
    return Key(tuple(names.split()), f"no counterpart unless it is off{but}: {why}", read)


def left_to_script(value: Any) -> Told | None:
    """Return what becomes of a key that says nothing by itself."""
    if value == "auto":
        return drop("the script says it")
    return None if is_given(value) else drop("nothing is given")
