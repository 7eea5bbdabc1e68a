"""State that goes from one microbatch to the next, and what must not wait for another rank while it is in use."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from shardwright.partition.tree import ModelTree

#: The number of a buffer, or the id of a module or another object and the name of an attribute.
Key = int | tuple[int, str]


@dataclass(slots=True)
class _Use:
    first: int
    last: int
    users: set[str] = field(default_factory=set)
    ordered: bool = False


class CarriedState:
    """Notes when a forward uses buffers and attributes, and which modules are called meanwhile.

    Microbatches find such state in the order in which they run. Between its first and its last use in a forward no
    other microbatch may come in, so no call in between may go to another rank: whoever takes part in them is joined
    with the user of the state.
    """

    def __init__(self, tree: ModelTree) -> None:
        """Know which modules have parameters: the others never run elsewhere."""
        self._calls: list[tuple[str, str]] = []
        self._uses: dict[Key, _Use] = {}
        self._with_parameters = {entry.path for entry in tree.modules if _has_parameters(entry.module)}

    def called(self, caller: str, callee: str) -> None:
        """A module calls another."""
        self._calls.append((caller, callee))

    def used(self, key: Key, user: str, *, counts: bool = False) -> None:
        """A module reads or writes; `counts` says that it only adds, which can be done in any order."""
        now = len(self._calls)
        use = self._uses.get(key)
        if use is None:
            use = self._uses[key] = _Use(now, now)
        use.last = now
        use.users.add(user)
        use.ordered |= not counts

    def users(self, key: Key) -> set[str]:
        """The modules that have used it."""
        use = self._uses.get(key)
        return set() if use is None else use.users

    def joins(self, key: Key, name: str) -> dict[tuple[str, str], str]:
        """The modules that must be with the users of this state, which the forward changes, and why."""
        use = self._uses.get(key)
        if use is None or not use.ordered:
            return {}
        between = {path for call in self._calls[use.first : use.last] for path in call}
        reason = f"runs while the other uses {name}, which goes from one microbatch to the next"
        return {
            (path, user): reason
            for user in sorted(use.users)
            for path in sorted((between | use.users) & self._with_parameters)
            if between and path != user
        }


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
