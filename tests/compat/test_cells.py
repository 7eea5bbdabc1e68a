"""Each value of each key and argument works, is taken and said, or is refused at the door; ``make compat`` runs all."""

from __future__ import annotations

import pytest
from shardwright.errors import ConfigError

from tests.compat import accepted
from tests.compat.cells import CELLS, LAYOUTS, Cell
from tests.compat.cells.cell import REFUSED, SAID, WORKS
from tests.compat.cells.running import in_turn, problems
from tests.compat.interface import KEYS

#: Refused by the ranks that look for GPUs, and not by the configuration.
_BY_RANKS = "have no GPU"


def _came_to(cell: Cell) -> tuple[str, str]:
    try:
        _, idle = accepted.read(cell.config, LAYOUTS[cell.layout].ranks)
    except ConfigError as error:
        return REFUSED, str(error)
    return (SAID, "\n".join(idle)) if idle else (WORKS, "")


def test_every_key_comes_to_what_the_table_says_at_each_value_and_degree() -> None:
    wrong = []
    for cell in CELLS:
        if not cell.arguments and cell.words != _BY_RANKS:
            outcome, words = _came_to(cell)
            if outcome != cell.outcome or cell.words not in words:
                wrong.append(f"{cell}: {outcome} ({words}), and not {cell.outcome} ({cell.words})")
    assert wrong == []


def test_the_table_has_every_key_in_each_layout_and_each_outcome() -> None:
    assert len(CELLS) > 1000
    named = {(cell.name, cell.layout) for cell in CELLS}
    assert {(f"key {key.name}", layout) for key in KEYS for layout in LAYOUTS} <= named
    assert {cell.outcome for cell in CELLS} == {WORKS, SAID, REFUSED}
    assert all(cell.words for cell in CELLS if cell.outcome == REFUSED)


@pytest.mark.parametrize("layout", ["one rank", "pipeline"])
def test_some_cells_train_as_plain_pytorch_does(layout: str) -> None:
    chosen = [cell for cell in CELLS if cell.layout == layout]
    assert [f"{cell}: {why}" for cell, why in problems(in_turn(chosen, 9))] == []
