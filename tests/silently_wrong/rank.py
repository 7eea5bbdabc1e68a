"""One rank that runs scenarios one after another, each with a model of its own: ``rank.py NAME...``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

import shardwright as smp
import torch

from tests.silently_wrong import (  # noqa: F401
    calls,
    modules_and_hooks,
    scaling,
    state,
    transformers_outputs,
    untraced,
    weights,
)
from tests.silently_wrong.scenario import SCENARIOS, Exact


def outcome(name: str) -> dict[str, Any]:
    """What a scenario came to on this rank."""
    before = smp.stats()["server"]["total"]["sent"]
    torch.manual_seed(5)
    try:
        found = SCENARIOS[name]()
    except Exception as error:
        text = str(error)
        return {"outcome": "refused", "type": type(error).__name__, "text": text}
    after = smp.stats()["server"]["total"]["sent"]
    crossed = {kind: after[kind] - before[kind] for kind in ("forward", "backward")}
    if isinstance(found, Exact):
        return {"outcome": "exact", "worst": found.worst, "compared": found.compared, "crossed": crossed}
    return {"outcome": "ran", "value": found}


def main(names: Iterable[str]) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    smp.init(pipeline_parallel_degree=2, microbatches=2, ddp=True)
    for name in names:
        sys.stdout.write(json.dumps({"scenario": name, **outcome(name)}) + "\n")
        sys.stdout.flush()
        smp.barrier()


if __name__ == "__main__":
    main(sys.argv[1:] or list(SCENARIOS))
