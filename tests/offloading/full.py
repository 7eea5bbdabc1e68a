"""A rank of a job, the disk of whose rank 0 is full in the second of three steps.

usage: full.py
"""

from __future__ import annotations

import json
import resource
from typing import Any

import shardwright as smp
import torch
from shardwright.errors import ShardwrightError
from shardwright.job.runtime import current_runtime
from shardwright.offloading import OffloadedActivations, activations

from tests.offloading.model import MICROBATCHES, ROWS, WIDTH, Block, start, train


def main() -> None:
    activations.MOST_OUTGOING_BYTES = 0
    model = start(*(Block() for _ in range(6)))
    batch = torch.randn(MICROBATCHES * ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    expected = train(model, batch).stack().tolist()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if smp.rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    found: dict[str, Any] = {"kind": None}
    try:
        train(model, batch)
    except ShardwrightError as error:
        found = {"kind": type(error).__name__, "text": str(error)}
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    again = train(model, batch).stack().tolist()
    left = current_runtime()[OffloadedActivations].counts()["bytes"]
    print("found: " + json.dumps({**found, "again": again, "expected": expected, "left": left}), flush=True)
    smp.shutdown()


if __name__ == "__main__":
    main()
