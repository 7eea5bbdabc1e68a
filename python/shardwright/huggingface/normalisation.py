"""Whether a model divides the sum of its losses by the number that it is told."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardwright.checkpoints import random_state
from shardwright.delayed.materialise import has_delayed
from shardwright.huggingface.evaluation import samples_in
from shardwright.job.objects import allgather
from shardwright.job.ranks import WORLD
from shardwright.job.runtime import current_runtime
from shardwright.model import DistributedModel


def divides_by_number(
    model: DistributedModel, in_steps: Callable[..., Any], inputs: Mapping[str, Any], labels: torch.Tensor
) -> bool:
    """Return whether the loss of a model is a sum that it divides by ``num_items_in_batch``.

    Models of ``transformers`` accept the argument, but some return a mean all the same. So the model is run on one
    sample with two numbers, in evaluation mode: before it is divided on the first rank of each pipeline, and else in
    steps. All ranks call this, and get the same answer.

    Args:
        model: The model.
        in_steps: Runs it in steps.
        inputs: The inputs of a batch.
        labels: The labels of the batch.
    """
    runtime = current_runtime()
    row = int(labels.ne(-100).reshape(len(labels), -1).sum(dim=1).argmax())
    size = samples_in(inputs)
    sample = {
        name: value[row : row + 1] if isinstance(value, torch.Tensor) and value.dim() and len(value) == size else value
        for name, value in inputs.items()
    }
    alone = not model.placement.partitioned and not has_delayed(model.module)
    streams, training = random_state.streams(), model.training
    model.eval()
    try:
        with torch.no_grad():
            if not alone or runtime.place.is_root:
                run = model.module if alone else in_steps
                once, twice = (_loss(run(**sample, num_items_in_batch=torch.tensor(number))) for number in (1, 2))
                own = math.isclose(once, 2 * twice, rel_tol=1e-2) and once != 0
            else:
                own = True  # as the first rank says
    finally:
        model.train(training)
        random_state.restore(streams)
    return all(allgather(own, WORLD))


def _loss(outputs: Any) -> float:
    return float(outputs["loss"] if isinstance(outputs, Mapping) else outputs[0])
