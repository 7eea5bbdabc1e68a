"""What a step, or a hook, changes besides weights is afterwards as in one process in every layout, or is refused."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections import Counter
from typing import Any

from tests.jobs.ranks import outputs_of_ranks

from .changes import CHANGES, WHERE

DRAWS = int(os.environ.get("SHARDWRIGHT_TESTS_DRAWS", "8"))
SHARDS = {
    "ddp": True,
    "sharded_data_parallel_degree": 2,
    "sdp_param_persistence_threshold": 0,
    "sdp_gradient_clipping": 1e9,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": {"ddp": True},
    "shares": {"ddp": True, "shard_optimizer_state": True},
    "shards": SHARDS,
    "tensor": {"ddp": True, "tensor_parallel_degree": 2},
    "pipeline": {"pipeline_parallel_degree": 2},
    "replicas, disk": {"ddp": True, "offload_optimizer": "disk"},
    "shares, disk": {"ddp": True, "shard_optimizer_state": True, "offload_optimizer": "disk"},
    "pipeline, disk": {"pipeline_parallel_degree": 2, "offload_optimizer": "disk"},
}
#: What depends on which parameters a rank has. Nothing can tell that of hooks, whose groups are said to be a rank's.
OF_A_RANK = ("first_state", "number_of_parameters")
HOOKS = ("pre hook", "post hook", "both")
#: Without gradients there is nothing to try an optimizer by.
WITHOUT_GRADIENTS = ("none", "zeros", "zero_grad", "zero_grad_zeros")


def may_be_refused(change: str, where: str) -> bool:
    return change in (*OF_A_RANK, "fewer") or (change in WITHOUT_GRADIENTS and where == "before super().step()")


def found(ranks: int, layouts: list[dict[str, Any]], seed: int) -> Counter[str]:
    """Compare draws in each layout; all ranks have to find the same."""
    numbers = random.Random(seed)
    every = [
        (change, where, zeroes)
        for change, where, zeroes in itertools.product(CHANGES, WHERE, (False, True))
        if not (change in OF_A_RANK and where in HOOKS)
    ]
    cases = [
        {"change": change, "where": where, "zeroes": zeroes, "config": layout}
        for layout in layouts
        for change, where, zeroes in numbers.sample(every, min(DRAWS, len(every)))
    ]
    outputs = outputs_of_ranks("-m", "tests.optimizer_reach.changed", json.dumps(cases), ranks=ranks)
    of_ranks = [[json.loads(line) for line in output.splitlines() if line.startswith("{")] for output in outputs]
    counts: Counter[str] = Counter()
    for rows in zip(*of_ranks, strict=True):
        kinds = {row["found"].partition(":")[0] for row in rows}
        assert len(kinds) == 1, rows
        assert "WRONG" not in kinds, rows
        assert "exact" in kinds or may_be_refused(rows[0]["change"], rows[0]["where"]), rows
        counts.update(kinds)
    assert counts.total() == len(cases)
    return counts


def test_what_steps_change_over_ranks() -> None:
    counts = found(2, list(LAYOUTS.values()), seed=1)
    assert counts["exact"] > counts["refused"] > 0


def test_what_steps_change_in_chunks() -> None:
    assert found(1, [{"offload_optimizer": "disk"}], seed=2)["exact"]
