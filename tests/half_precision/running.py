"""Runs a case as a job of ranks."""

from __future__ import annotations

import json
from typing import Any

from tests.jobs.ranks import outputs_of_ranks

#: The layouts by name: the number of ranks, and the configuration.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "pp 2": (2, {"pipeline_parallel_degree": 2}),
    "dp 2": (2, {"ddp": True}),
    "pp 2, dp 2": (4, {"pipeline_parallel_degree": 2, "ddp": True}),
    "tp 2": (2, {"tensor_parallel_degree": 2, "ddp": True}),
    "pp 2, tp 2": (4, {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "ddp": True}),
}


def configuration(kind: str | None, keys: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a job in ``fp16`` or ``bf16``, or neither, in which sums have one order."""
    # Gradients that are sent during backward are divided after their sum, which may overflow earlier.
    order = {"deterministic_server": True, "overlapping_allreduce": False}
    return {**({} if kind is None else {kind: True}), "microbatches": 2, **order, **keys}


def run(
    case: str, layout: str, kind: str | None, config: dict[str, Any] | None = None, /, **parameters: Any
) -> list[Any]:
    """Run a case on every rank of a layout in ``fp16`` or ``bf16``, or neither; returns what each rank saw."""
    ranks, keys = LAYOUTS[layout]
    given = configuration(kind, {**keys, **(config or {})})
    command = ("-m", "tests.half_precision.rank", case, json.dumps(given), json.dumps(parameters))
    return [json.loads(output.splitlines()[-1]) for output in outputs_of_ranks(*command, ranks=ranks)]
