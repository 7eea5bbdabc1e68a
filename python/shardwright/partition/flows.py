"""State that a forward passes on to later executions and later microbatches, as observed in a trace.

On several ranks, microbatches take turns at every call that leaves the rank. Another microbatch may overwrite what one
execution leaves for a later one, unless both executions are within one module that is entirely on one rank. The *scope*
of such a flow, the innermost module that encloses all its users, determines whether this can happen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardwright.execution.placed import KeptState
from shardwright.partition.tree import ModelTree


@dataclass(frozen=True, kw_only=True)
class CrossingFlow:
    """State that goes from one execution to another, described by a text.

    Attributes:
        scope: The path of the innermost module that encloses all users.
        meets_backward: Whether a backward uses or changes it, so that even placement on one rank does not protect it.
    """

    scope: str
    what: str
    meets_backward: bool = False


def scope_of(users: Iterable[str], executions: Mapping[str, int]) -> str | None:
    """Return the scope of state that these modules share; None if it stays within one execution.

    `executions` tells how often each module ran in the forward.
    """
    distinct = sorted(set(users))
    if sum(executions.get(path, 0) for path in distinct) <= 1:
        return None
    parts = [path.split(".") if path else [] for path in distinct]
    if len(parts) == 1:
        return ".".join(parts[0][:-1])
    common: list[str] = []
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return ".".join(common)


def merged(
    found: Iterable[tuple[Iterable[str], Iterable[str]]], executions: Mapping[str, int]
) -> tuple[KeptState, ...]:
    """Merge states, given as names and the paths of users, if they have the same users.

    State without names is not merged with state that has names.
    """
    names: dict[tuple[frozenset[str], bool], set[str]] = {}
    for held, users in found:
        running, held = frozenset(path for path in users if executions.get(path)), set(held)
        if running:
            names.setdefault((running, bool(held)), set()).update(held)
    states = [
        KeptState(names=tuple(sorted(held)), users={path: executions[path] for path in sorted(users)})
        for (users, _), held in names.items()
    ]
    return tuple(sorted(states, key=lambda state: state.names))


def without_trace(tree: ModelTree) -> tuple[KeptState, ...]:
    """Return the state that is assumed without a trace: every buffer changes, and each holder uses it once."""
    return merged(((one.names, one.holders) for one in tree.buffers), {entry.path: 1 for entry in tree.modules})
