"""A job with a pipeline in which something is trained, and no model of the job takes part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwright.job.runtime import Runtime
from shardwright.model.models import Models


@contextmanager
def noticed(runtime: Runtime) -> Iterator[None]:
    """Warn, once, of an update in a job with a pipeline that no step has used yet: every rank then trains by itself."""
    place = runtime.place
    if place.pp_size == 1:
        yield
        return

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        handle.remove()
        if runtime.step.number or any(True for _ in runtime[Models].alive):
            return
        if place.rank == 0:
            runtime.logger.warning(
                "pipeline_parallel_degree is %d, and %s updates parameters before any model was divided: every rank "
                "trains all of its model by itself, as without a pipeline. Wrap the model in smp.DistributedModel and "
                "train it in functions decorated with smp.step, or use Trainer of shardwright.huggingface (over_ranks "
                "makes one of any other trainer, and shardwright run --trainers of all), ShardwrightStrategy of "
                "shardwright.lightning or Accelerator of shardwright.accelerate in place of those of transformers, "
                "Lightning and accelerate",
                place.pp_size,
                type(optimizer).__name__,
            )

    handle = register_optimizer_step_pre_hook(look)
    try:
        yield
    finally:
        handle.remove()
