"""What modules keep from one microbatch to the next, as a trace saw it: who uses it, and how often."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from shardwright.execution.placed import KeptState
from shardwright.partition.tree import ModelTree


def merged(
    found: Iterable[tuple[Iterable[str], Iterable[str]]], executions: Mapping[str, int]
) -> tuple[KeptState, ...]:
    """State with the same users is one; but tensors that have no names stay apart, which nobody else can tell.

    Args:
        found: Names of each state, with the paths of its users.
        executions: How often each module ran in the forward.
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
    """Without a trace any buffer may change: those who hold it are taken to use it once."""

    def found() -> Iterator[tuple[Iterable[str], Iterable[str]]]:
        for entry in tree.buffers:
            yield entry.names, entry.holders

    return merged(found(), {entry.path: 1 for entry in tree.modules})
