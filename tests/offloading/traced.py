"""A rank of a job that traces a step.

usage: traced.py
"""

from __future__ import annotations

import json
from typing import Any

import shardwright as smp
import torch
from shardwright.offloading import activations

from tests.offloading.model import MICROBATCHES, ROWS, WIDTH, Block, start, train


def of_kind(records: list[dict[str, Any]], rank: int, kind: str) -> dict[str, Any]:
    own = [record for record in records if record["rank"] == rank]
    found = [record for record in own if record["kind"] == kind]
    tasks = [record for record in own if record["kind"] in ("root", "backward")]
    inside = [
        record
        for record in found
        if any(task["start_ns"] <= record["start_ns"] and record["end_ns"] <= task["end_ns"] for task in tasks)
    ]
    return {
        "number": len(found),
        "inside": len(inside),
        "bytes": sum(record["bytes"] for record in found),
        "modules": sorted({record.get("module", "") for record in found}),
    }


def main() -> None:
    activations.MOST_OUTGOING_BYTES = 0
    model = start(*(Block() for _ in range(6)))
    batch = torch.randn(MICROBATCHES * ROWS, WIDTH)
    train(model, batch)
    with smp.trace() as traced:
        train(model, batch)
    report = smp.memory_report()
    if traced.timeline is not None:
        records = traced.timeline.records()
        kinds = ("recompute", "offload", "load")
        spans = {rank: {kind: of_kind(records, rank, kind) for kind in kinds} for rank in (0, 1)}
        summary = {row["rank"]: row for row in traced.timeline.summary()["ranks"]}
        print("found: " + json.dumps({"spans": spans, "summary": summary, "report": report}), flush=True)
    smp.shutdown()


if __name__ == "__main__":
    main()
