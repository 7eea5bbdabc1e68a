"""``smp.step``, which knows the two steps of transformers' ``Trainer``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import shardwright
import torch

#: Where transformers has its steps.
_TRAINER = "transformers.trainer_pt_utils"


@functools.wraps(shardwright.step)
def step(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Decorate a step function; see ``shardwright.step``."""

    def decorate(wrapped: Callable[..., Any]) -> Any:
        if getattr(wrapped, "__module__", None) == _TRAINER:
            return StepOfTrainer(wrapped)
        return shardwright.step(**options)(wrapped)

    return decorate if function is None else decorate(function)


class StepOfTrainer:
    """A step of ``Trainer``, for a batch of any size: the last one of an epoch may be smaller than the others."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Wrap a function of a model, its inputs and further arguments."""
        self._function = function
        self._steps: dict[int, Any] = {}

    def __call__(self, model: Any, inputs: Any, *others: Any) -> Any:
        """Run it in as many microbatches as are configured; in training, as divide the batch evenly."""
        from shardwright.huggingface.evaluation import samples_in
        from smdistributed.modelparallel.torch._trainer import divided_of

        samples = samples_in(inputs)
        count = min(int(shardwright.state.cfg.microbatches), samples)
        while torch.is_grad_enabled() and samples % count:
            count -= 1
        if count not in self._steps:
            self._steps[count] = shardwright.step(microbatches=count)(self._function)
        divided = divided_of(model)
        return self._steps[count](model if divided is None else divided, inputs, *others)
