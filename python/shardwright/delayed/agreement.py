"""Computing the same delayed values on several ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

from shardwright.delayed.operations import Value, fingerprint, operations_of


def draw_as_first(values: Iterable[Value], gather: Callable[[Any], list[Any]], *, is_first: bool) -> bool:
    """Make all ranks of a group use the random numbers of the first one for some values, which stay delayed.

    The values come in the same order on all ranks; ``gather`` gives what each rank passed to it, the first one's first.
    Returns whether they do now; otherwise the values do not come about in the same way on all ranks.
    """
    operations = operations_of(values)
    drawing = [(each, each.generator_state) for each in operations if each.generator_state is not None]
    states = [state for _, state in drawing]
    digest = hashlib.sha256()
    for state in states:
        digest.update(state.numpy().tobytes())
    ways, draws = zip(*gather((fingerprint(operations), digest.hexdigest())), strict=True)
    if len(set(ways)) > 1:
        return False
    if len(set(draws)) > 1:
        for (operation, _), state in zip(drawing, gather(states if is_first else None)[0], strict=True):
            operation.generator_state = state
    return True
