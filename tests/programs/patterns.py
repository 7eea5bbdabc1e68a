"""Operations of a module and its caller that belong together, and that drawn one by one rarely meet."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from tests.programs.blocks import Operation

#: The operations of a module, which returns the last tensor, and those of its caller.
Pattern = tuple[list[Operation], list[Operation]]

Drawn = TypeVar("Drawn")

_WRITES = ("add", "mul", "copy", "tanh", "zero", "row")
_STYLES = ("plain", "keyword", "list", "dict", "direct")


def _written_argument(draw: random.Random, part: int, place: int) -> Pattern:
    """A module writes to its argument, and its caller goes on with that."""
    inside = [["weight"], ["write", draw.choice(_WRITES), 0, -1], ["weigh", 0]]
    first = draw.choice((["weigh", place], ["unary", "clone", place]))
    outside = [first, ["call", part, [-1], draw.choice(_STYLES), 1], ["sum", -2, -1, draw.random() < 0.4]]
    return inside, outside


def _carried_graph(draw: random.Random, part: int, place: int) -> Pattern:
    """A module's second call computes with what its first one left behind; both results are used."""
    inside = [["weigh", 0], ["hand", -1], ["sum", -1, -2, draw.random() < 0.4]]
    outside = [["call", part, [place], draw.choice(_STYLES), 2], ["sum", -2, -1, draw.random() < 0.4]]
    return inside, outside


def _written_result(draw: random.Random, part: int, place: int) -> Pattern:
    """A caller writes to a result that the module keeps for its second call."""
    first, second = (["call", part, [place], draw.choice(_STYLES), 1] for _ in range(2))
    return [["weigh", 0], ["hand", -1]], [first, ["write", draw.choice(_WRITES), -1, 0], second]


def _written_again(draw: random.Random, part: int, place: int) -> Pattern:
    """A module's second call writes to what its first one returned; both results are used."""
    inside = [["weigh", 0], ["hand", -1], ["write", draw.choice(_WRITES), -1, 0]]
    outside = [["call", part, [place], draw.choice(_STYLES), 2], ["sum", -2, -1, False]]
    return inside, outside


#: How often each pattern is drawn: programs with one of the last two are refused where the module is remote.
_PATTERNS: tuple[tuple[float, Callable[[random.Random, int, int], Pattern]], ...] = (
    (0.03, _written_argument),
    (0.03, _carried_graph),
    (0.007, _written_result),
    (0.007, _written_again),
)


def drawn_pattern(seed: str, name: str, patterns: Sequence[tuple[float, Drawn]]) -> tuple[random.Random, Drawn | None]:
    """What draws for a program's pattern, and the pattern, which few programs have.

    Args:
        seed: The program's.
        name: Of the kind of patterns.
        patterns: Each with its share of all programs.
    """
    # The same pattern in every attempt of a seed, or those that plain torch often refuses would be rare.
    chance = random.Random(f"{seed.partition('.')[0]} {name}").random()
    draw = random.Random(f"{seed} {name}")
    for share, pattern in patterns:
        if chance < share:
            return draw, pattern
        chance -= share
    return draw, None


def add_pattern(seed: str, tree: dict[str, Any], key: int) -> str | None:
    """Give one of a tree's modules another part, with operations on both sides, in some programs.

    Args:
        seed: The program's.
        tree: The modules as data; changed in place.
        key: That of the new part.

    Returns:
        The path of the new part, if there is one.
    """
    draw, pattern = drawn_pattern(seed, "pattern", _PATTERNS)
    if pattern is None:
        return None
    path, caller = draw.choice(list(callers(tree, "")))
    parts = caller["parts"]
    inside, outside = pattern(draw, len(parts), draw.choice((0, -1)))
    parts.append({"operations": inside, "result": ["one", [-1]], "parts": [], "key": key})
    if draw.random() < 0.5:
        caller["operations"] += outside
    else:
        caller["operations"][:0] = outside
    return f"{path}parts.{len(parts) - 1}"


def callers(spec: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The modules that run operations, with their paths."""
    if "operations" in spec:
        yield path, spec
        for index, part in enumerate(spec["parts"]):
            yield from callers(part, f"{path}parts.{index}.")
