"""One of two ranks: rank 0 calls a module of rank 1 that does next to nothing, and tells how long each call took.

usage: python -m benches.call.rank CALLS STEPS dynamic|static [stages], as a rank of a job; rank 0 prints JSON
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import shardwright as smp
import torch
from torch import nn

#: How long each call took, on rank 0, and how long in the mean of a step, up to the last one's value.
_microseconds: list[float] = []
_means: list[float] = []


class Empty(nn.Module):
    """Has a parameter, so that a rank owns it, and copies its argument."""

    def __init__(self) -> None:
        """A parameter that takes part in nothing."""
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


class Caller(nn.Module):
    """Calls the module of the other rank again and again, each time with what it gave."""

    def __init__(self, calls: int) -> None:
        """Make as many calls as that in each forward."""
        super().__init__()
        self.calls = calls
        self.here, self.there = nn.Linear(4, 4), Empty()
        smp.set_partition(self.there, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.here(x)
        now = time.perf_counter
        first = now()
        for _ in range(self.calls):
            began = now()
            y = self.there(y)
            _microseconds.append(1e6 * (now() - began))
        y = y * 1  # in static mode the value is waited for only now
        _means.append(1e6 * (now() - first) / self.calls)
        return y


def ping_pong(count: int) -> list[float]:
    """Microseconds that such a tensor takes there and back between two scripts, on rank 0."""
    found = []
    other, tensor = 1 - smp.rank(), torch.ones(1, 4)
    for _ in range(count):
        began = time.perf_counter()
        if smp.rank() == 0:
            smp.send(tensor, other, smp.RankType.WORLD_RANK)
            smp.recv_from(other, smp.RankType.WORLD_RANK)
        else:
            smp.send(smp.recv_from(other, smp.RankType.WORLD_RANK), other, smp.RankType.WORLD_RANK)
        found.append(1e6 * (time.perf_counter() - began))
    return found[count // 10 :]


def main() -> None:
    calls, steps = map(int, sys.argv[1:3])
    keys = {"pipeline_parallel_degree": 2, "microbatches": 1, "auto_partition": False, "default_partition": 0}
    if sys.argv[3] == "static":
        keys |= {"static_mode": True, "fast_mode": True, "static_steps": 1}
    smp.init(keys)
    model = smp.DistributedModel(Caller(calls))

    @smp.step
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        model.backward(loss)
        return loss

    def run(count: int) -> list[float]:
        _microseconds.clear()
        _means.clear()
        for _ in range(count):
            step(torch.ones(1, 4))
            model.zero_grad()
        return list(_microseconds)

    run(3)  # traces, divides, warms up
    found: dict[str, Any] = {"calls": run(steps), "means": list(_means)}
    found["ping_pong"] = ping_pong(calls * steps)
    if "stages" in sys.argv[4:]:
        found["stages"] = stages_of(lambda: run(steps))
    if smp.rank() == 0:
        found["reached_by"] = smp.comm_stats()["peers"][1]["reached_by"]
        print(json.dumps(found))
    smp.shutdown()


def stages_of(run: Callable[[], object]) -> list[Any]:
    """Where the time goes, by rank; on rank 0."""
    from benches.call.stages import Stages  # names functions of this commit

    stages = Stages()
    stages.install()
    try:
        run()
    finally:
        stages.uninstall()
    if smp.rank() == 1:
        smp.send(stages.medians(), 0, smp.RankType.WORLD_RANK)
        return []
    return [stages.medians(), smp.recv_from(1, smp.RankType.WORLD_RANK)]


if __name__ == "__main__":
    main()
