"""The children of an ``nn.Sequential`` while groups of them stand in their place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


class _Groups(dict[str, nn.Module | None]):
    """Stands in the place of a module's ``_modules`` while its forward runs.

    A forward may wait for values from other ranks while that of another microbatch runs, so several may be in it.

    Attributes:
        children: The children themselves, as the module holds them.
        users: How many forwards are in progress.
    """

    def __init__(self, groups: list[nn.Module], children: dict[str, nn.Module | None]) -> None:
        super().__init__((str(index), group) for index, group in enumerate(groups))
        self.children = children
        self.users = 0


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dictionary of a module's children, also while groups stand in their place."""
    found: dict[str, nn.Module | None] = vars(module)["_modules"]
    return found.children if isinstance(found, _Groups) else found


@contextmanager
def grouped(module: nn.Module, groups: list[nn.Module]) -> Iterator[None]:
    """Let groups stand in the place of a module's children in the block.

    If a forward of another microbatch is in progress, its groups stay, which compute the same: how modules are grouped
    decides only what is kept for the backward.
    """
    own = vars(module)
    current = own["_modules"]
    if not isinstance(current, _Groups):
        current = own["_modules"] = _Groups(groups, current)
    current.users += 1
    try:
        yield
    finally:
        current.users -= 1
        if current.users == 0:
            own["_modules"] = current.children
