"""The rows of the table of cells."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

#: What may come of a cell.
WORKS, SAID, REFUSED = "works", "said", "refused"


@dataclass(frozen=True)
class Layout:
    """How a job is divided.

    Attributes:
        ranks: How many ranks it has.
        config: The keys that a script gives for it.
    """

    ranks: int
    config: Mapping[str, Any]


LAYOUTS: Mapping[str, Layout] = {
    "one rank": Layout(1, {}),
    "pipeline": Layout(2, {"partitions": 2, "microbatches": 2}),
    "tensor": Layout(2, {"ddp": True, "tensor_parallel_degree": 2}),
    "replicas": Layout(2, {"ddp": True, "microbatches": 2}),
    "sharded": Layout(2, {"ddp": True, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}),
    "pipeline, float16": Layout(2, {"partitions": 2, "microbatches": 2, "fp16": True}),
    "sharded, bfloat16": Layout(2, {"ddp": True, "sharded_data_parallel_degree": 2, "bf16": True}),
}


@dataclass(frozen=True)
class Cell:
    """One value of one key or argument in one layout.

    Attributes:
        name: What it is a value of.
        value: The value, as scripts write it.
        layout: A name in ``LAYOUTS``.
        config: All keys of the job.
        arguments: Arguments of calls, by what is called; see ``tests.compat.cells.script``.
        outcome: What comes of it.
        words: A part of what is said, or of the error.
    """

    name: str
    value: str
    layout: str
    config: Mapping[str, Any]
    outcome: str
    words: str = ""
    arguments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __str__(self) -> str:
        """Show where it is in the table."""
        return f"{self.name} = {self.value} ({self.layout})"

    def to_json(self) -> dict[str, Any]:
        """Return what a rank needs of it."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]
