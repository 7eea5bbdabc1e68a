"""The cells of configuration keys: each at each value of the interface's table, alone and with the keys it needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.compat.cells.cell import LAYOUTS, Cell
from tests.compat.cells.expected import expected
from tests.compat.interface import KEYS, Key

#: Values that ask for what no job here is: a port of its own for each job, which the harness gives.
_NOT_RUN = {("ddp_port", 29400)}
#: Of keys of which a job has two names, the one whose value in the layout gives way.
_OTHER_NAMES = {"partitions": "pipeline_parallel_degree", "pipeline_parallel_degree": "partitions"}


def cells() -> Iterator[Cell]:
    """Yield all of them."""
    for key in KEYS:
        for value in dict.fromkeys((*key.values, *key.refused_values)):
            if (key.name, value) in _NOT_RUN:
                continue
            for layout in LAYOUTS:
                yield from _of(key, value, layout)


def _of(key: Key, value: Any, layout: str) -> Iterator[Cell]:
    job = LAYOUTS[layout]
    base = {name: one for name, one in job.config.items() if name != _OTHER_NAMES.get(key.name)}
    for beside in ({}, key.beside) if key.beside else ({},):
        config = {**beside, **base, **{key.name: value}}
        shown = repr(value) + "".join(f" with {name} {config[name]!r}" for name in beside)
        outcome, words = expected(config, job.ranks)
        yield Cell(f"key {key.name}", shown, layout, config, outcome, words)
