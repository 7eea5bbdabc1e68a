"""Operations that belong together in wide programs: of a module, of a part that is placed apart, and of both."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.programs.patterns import callers, drawn_pattern

#: The part, and the operations of its caller.
Pattern = tuple[dict[str, Any], list[list[Any]]]

_WRITES = ("relu", "tanh", "mul", "row", "add")


def _part(operations: list[list[Any]], key: int, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"operations": operations, "result": ["one", [-1]], "parts": [*parts], "key": key}


def _checkpointed_write(draw: random.Random, part: int, key: int) -> Pattern:
    """A checkpoint around a block whose part begins with an activation in place."""
    inner = _part([["write", draw.choice(_WRITES), 0, 0], ["weigh", 0]], key)
    outer = _part([["weigh", 0], ["call", 0, [-1], "plain", 1], ["unary", "tanh", -1]], key + 1, inner)
    return outer, [["call", part, [0], "checkpoint", 1]]


def _written_view_with_a_hook(draw: random.Random, part: int, key: int) -> Pattern:
    """A hook on a view that a part writes to."""
    inside = _part([["write", draw.choice(_WRITES), 0, 0], ["weigh", 0]], key)
    view = draw.choice(("same", "row", "flat", "transposed"))
    return inside, [
        ["viewhook", f"pattern{key}", view, 0, True],
        ["call", part, [-1], "plain", 1],
        ["sum", -1, 0, False],
    ]


def _loop_and_statistics(draw: random.Random, part: int, key: int) -> Pattern:
    """A loop by data over one part of a module, and batch statistics behind it."""
    loop = _part([["unary", "tanh", 0], ["weigh", -1]], key)
    norm = {"layer": draw.choice(("normalisation", "Quantiser", "Warmup", "Queue")), "width": 8}
    outer = _part([["until", 0, 0, 0.1, 4], ["resize", -1, 8], ["call", 1, [-1], "plain", 1]], key + 1, loop, norm)
    return outer, [["call", part, [0], "plain", 1]]


def _back_and_forth(draw: random.Random, part: int, key: int) -> Pattern:
    """Two parts of a part, one of which gives what the other needs, called in turns."""
    one, other = ({"layer": "linear", "width": 160}, {"layer": "sequential", "width": 160, "activations": [1, 1]})
    calls = [["call", index % 2, [-1], "plain", 1] for index in range(draw.choice((2, 4)))]
    return _part([["resize", 0, 160], *calls], key, one, other), [["call", part, [0], "plain", 1]]


_PATTERNS: tuple[tuple[float, Callable[[random.Random, int, int], Pattern]], ...] = (
    (0.03, _checkpointed_write),
    (0.02, _written_view_with_a_hook),
    (0.04, _loop_and_statistics),
    (0.04, _back_and_forth),
)


def add_wide_pattern(seed: str, tree: dict[str, Any], key: int) -> str | None:
    """Give one of a tree's modules another part with operations on both sides, in some programs.

    Args:
        seed: The program's.
        tree: The modules as data; changed in place.
        key: The first key that is free.

    Returns:
        The path of the new part, if there is one.
    """
    draw, pattern = drawn_pattern(seed, "wide pattern", _PATTERNS)
    if pattern is None:
        return None
    path, caller = draw.choice(list(callers(tree, "")))
    parts = caller["parts"]
    part, operations = pattern(draw, len(parts), key + 1)
    parts.append(part)
    caller["operations"] += operations
    return f"{path}parts.{len(parts) - 1}"
