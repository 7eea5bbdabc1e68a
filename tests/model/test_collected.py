"""Models that nobody uses any more, until and while the garbage collection finds them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import shardwright as smp
from shardwright.job.runtime import Runtime
from shardwright.model.models import Models
from torch import nn

from tests.frames.job import Job, in_process_ranks


class Collecting(nn.Module):
    """A collection strikes whenever somebody looks through its modules."""

    def modules(self, *arguments: Any) -> Iterator[nn.Module]:
        gc.collect()
        return super().modules(*arguments)


def test_a_place_is_given_by_hand_while_earlier_models_are_collected() -> None:
    def main(runtime: Runtime) -> Any:
        used = smp.DistributedModel(Collecting())
        unused = smp.DistributedModel(nn.Linear(2, 2))
        unused.itself = [unused]
        del unused
        assert len(runtime[Models].alive) == 2, "a cycle is kept until a collection"
        used.placement._placed = True  # as after the first step, when set_partition looks through the model
        smp.set_partition(nn.Linear(2, 2), 1)
        used.placement._placed = False
        gc.collect()
        return [model is used for model in runtime[Models].alive]

    with in_process_ranks():
        job = Job(2)
        try:
            results = job.run(main, {"microbatches": 1})
        finally:
            job.close()
    assert results == [[True], [True]]
