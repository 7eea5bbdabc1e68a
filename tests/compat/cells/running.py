"""Runs cells in jobs: the cells of one layout one after another on the same ranks."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tests.compat.cells.cell import LAYOUTS, Cell
from tests.jobs.forked import ROOT
from tests.jobs.patience import HANG_SECONDS
from tests.jobs.ranks import run_ranks

_SECONDS_PER_CELL = 20.0
#: After so many failures in one layout, the rest of it fails without a run.
_MAX_FAILURES = 20


def problems(cells: Sequence[Cell]) -> Iterator[tuple[Cell, str]]:
    """Run cells, and yield those that did not come to what they should, each with what did."""
    for layout in LAYOUTS:
        chosen = [cell for cell in cells if cell.layout == layout]
        if chosen:
            with tempfile.TemporaryDirectory(prefix="cells-") as folder:
                yield from _of_layout(chosen, Path(folder))


def _of_layout(cells: list[Cell], folder: Path) -> Iterator[tuple[Cell, str]]:
    left, ranks, failures = cells, LAYOUTS[cells[0].layout].ranks, 0
    while left:
        failures += 1
        if failures > _MAX_FAILURES:
            yield from ((cell, "not run: too many before it have failed") for cell in left)
            return
        listed = folder / "cells.json"
        listed.write_text(json.dumps([cell.to_json() for cell in left]))
        environment = {"COMPAT_CELLS": str(folder), "PYTHONPATH": f"{ROOT}"}
        ended = run_ranks(
            *("-m", "tests.compat.cells.rank", str(listed)),
            ranks=ranks,
            seconds=HANG_SECONDS + _SECONDS_PER_CELL * len(left),
            folder=folder,
            environment=environment,
        )
        done = [_rows(one.out) for one in ended]
        through = min(len(rows) for rows in done)
        failed = [rows[through - 1]["problem"] for rows in done if through and rows[through - 1]["problem"]]
        if through == len(left) and not failed:
            return
        if failed:
            yield left[through - 1], "\n".join(dict.fromkeys(map(str, failed)))
            left = left[through:]
        else:  # a rank has ended by itself
            yield left[through], "\n".join(one.err[-2000:] for one in ended)
            left = left[through + 1 :]


def _rows(out: str) -> list[dict[str, str | None]]:
    return [json.loads(line) for line in out.splitlines() if line.startswith('{"cell"')]


def in_turn(cells: Iterable[Cell], every: int) -> list[Cell]:
    """Choose one of so many cells, of each layout and outcome in turn."""
    return [cell for number, cell in enumerate(cells) if number % every == 0]
