"""The whole table of cells, and what is told of it."""

from __future__ import annotations

from collections import Counter

from tests.compat.cells import arguments, keys
from tests.compat.cells.cell import REFUSED, Cell

CELLS: tuple[Cell, ...] = (*keys.cells(), *arguments.cells())


def reasons() -> Counter[str]:
    """Return how many cells are refused for each reason."""
    return Counter(cell.words for cell in CELLS if cell.outcome == REFUSED)
