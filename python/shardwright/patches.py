"""Functions of torch that the library replaces while a job runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_ORIGINAL = "_shardwright_original"


def original_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a function of the library's own stands for, or the function itself."""
    original: Callable[..., Any] = getattr(function, _ORIGINAL, function)
    return original


class Patches:
    """Replacements of attributes, put in place once however many runtimes of the process want them."""

    def __init__(self, places: tuple[tuple[Any, str, Callable[..., Any]], ...]) -> None:
        """``places`` are the owner of each attribute, its name, and what stands there meanwhile."""
        self._places = places
        self._users = 0
        self._before: list[tuple[Any, str, bool, Any]] = []
        self._original: dict[str, Any] = {}

    @property
    def original(self) -> Mapping[str, Any]:
        """What was there before, by the attribute's name."""
        return self._original

    @property
    def users(self) -> int:
        """How many runtimes want the replacements."""
        return self._users

    def install(self) -> None:
        """Put the replacements in place."""
        self._users += 1
        if self._users > 1:
            return
        for owner, name, replacement in self._places:
            self._original[name] = getattr(owner, name)
            setattr(replacement, _ORIGINAL, self._original[name])
            # A class may inherit the attribute; then it has none of its own to get back.
            self._before.append((owner, name, name in vars(owner), vars(owner).get(name)))
            setattr(owner, name, replacement)

    def uninstall(self) -> None:
        """Put back what was there, once nobody wants the replacements any more."""
        self._users -= 1
        if self._users > 0:
            return
        for owner, name, had_own, value in self._before:
            if had_own:
                setattr(owner, name, value)
            else:
                delattr(owner, name)
        self._before.clear()
        self._original.clear()

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the replacements in place while the block runs."""
        self.install()
        try:
            yield
        finally:
            self.uninstall()


@contextlib.contextmanager
def replaced(owner: Any, functions: Mapping[str, Any]) -> Iterator[None]:
    """Have these functions in the place of the owner's attributes while the block runs."""
    with Patches(tuple((owner, name, function) for name, function in functions.items())).in_place():
        yield
