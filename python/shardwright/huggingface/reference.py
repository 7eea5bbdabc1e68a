"""Models beside the one that is trained, such as references and teachers, for code that knows nothing of steps."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from shardwright.accelerate import Accelerator
from shardwright.job.runtime import current_runtime
from shardwright.model import DistributedModel
from shardwright.step import StepOutput, step


class ReferenceModel(DistributedModel):
    """A divided model whose calls outside of steps, without gradients, are steps. All ranks make them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        if current_runtime().step.running or torch.is_grad_enabled():
            return super().__call__(*args, **kwargs)
        return tree_map(lambda one: one.outputs[0] if isinstance(one, StepOutput) else one, _called(self, args, kwargs))


@step(microbatches=1)
def _called(model: DistributedModel, args: Any, kwargs: Any) -> Any:
    return model(*args, **kwargs)


class AcceleratorOfTrainer(Accelerator):
    """The accelerator of a trainer, whose class prepares models beside the one that is trained."""

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Divide a model; of one that is not trained, calls outside of steps are steps."""
        prepared = super().prepare_model(model, device_placement, evaluation_mode)
        if evaluation_mode and type(prepared) is DistributedModel:
            prepared.__class__ = ReferenceModel
        return prepared
