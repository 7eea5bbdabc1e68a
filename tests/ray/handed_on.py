"""Two ranks of a pipeline iterate over a shard that the first one reads; the iterator is one of lists, not Ray's.

Each says in a line what it has seen.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import shardwright as smp
import torch

if "ray" not in sys.modules:  # the shard itself needs nothing of Ray
    for name in ("ray", "ray.data", "ray.train"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["ray"].train = sys.modules["ray.train"]  # type: ignore[attr-defined]
    sys.modules["ray.train"].DataConfig = object  # type: ignore[attr-defined]

from shardwright.ray.shard import Shard


class Rows:
    """Stands for Ray's iterator."""

    def __init__(self, count: int, fails_at: int | None = None) -> None:
        self.count, self.fails_at, self.read = count, fails_at, 0

    def iter_torch_batches(self, batch_size: int) -> Iterator[dict[str, torch.Tensor]]:
        for begin in range(0, self.count, batch_size):
            if begin == self.fails_at:
                raise ValueError("a row is not liked")
            self.read += 1
            yield {"row": torch.arange(begin, min(begin + batch_size, self.count))}


def first_values(batches: Any) -> list[Any]:
    return [None if batch is None else batch["row"].tolist() for batch in batches]


def failure(work: Callable[[], Any]) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def main() -> None:
    smp.init({"pipeline_parallel_degree": 2})
    pair = [[0, 1]]
    whole = Shard("whole", Rows(10), pair, hands_on=True).iter_torch_batches(batch_size=4)
    found: dict[str, Any] = {"epochs": [first_values(whole), first_values(whole)]}
    broken_off = Shard("broken off", Rows(100), pair, hands_on=True)
    batches = broken_off.iter_torch_batches(batch_size=4)
    found["broken off"] = [[next(iter(batches))["row"].tolist()], len(first_values(batches))]
    found["without"] = first_values(Shard("without", Rows(8), pair, hands_on=False).iter_torch_batches(batch_size=4))
    rows = Rows(400)
    ahead = iter(Shard("ahead", rows, pair, hands_on=True).iter_torch_batches(batch_size=4))
    if smp.rank() == 0:
        for _ in range(2):
            next(ahead)
        found["read ahead"] = rows.read
        smp.send("two are read", 1, smp.RankType.WORLD_RANK)
    else:
        smp.recv_from(0, smp.RankType.WORLD_RANK)
    found["rest"] = len(list(ahead))
    failing = Shard("failing", Rows(12, fails_at=8), pair, hands_on=True)
    found["failing"] = failure(lambda: list(failing.iter_torch_batches(batch_size=4)))
    other = Shard("other", Rows(8), [[0], [1]], hands_on=True)
    found["other"] = failure(lambda: list(other.iter_torch_batches(batch_size=4)))
    print(json.dumps(found), flush=True)
    smp.shutdown()


if __name__ == "__main__":
    main()
