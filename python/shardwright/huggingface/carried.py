"""What code in a step leaves on a trainer reaches the other ranks of its pipeline, where that code does not run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardwright.huggingface.plain import changes, marks, take
from shardwright.job.objects import allgather
from shardwright.job.ranks import PP_GROUP
from shardwright.job.runtime import current_runtime


@contextmanager
def carried(trainer: Any) -> Iterator[None]:
    """Give all ranks of a pipeline the plain values that the block has changed on the trainer of the first one.

    All ranks call this.
    """
    if current_runtime().place.pp_size == 1:
        yield
        return
    before = marks(trainer)
    yield
    told = allgather(changes(trainer, before), PP_GROUP)[0]
    if current_runtime().place.pp_rank:
        take(trainer, told)
