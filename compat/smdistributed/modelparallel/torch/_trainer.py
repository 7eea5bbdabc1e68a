"""What ``Trainer`` of transformers needs on its path for the original library, where it is incomplete by itself.

That path is taken if ``SM_HP_MP_PARAMETERS`` has ``partitions`` and ``SM_FRAMEWORK_PARAMS`` has
``sagemaker_mpi_enabled``. In transformers 5, it creates no optimizer for a model that it has wrapped itself, wraps the
model anew for every evaluation, and leaves it to accelerate to count processes, to gather and to clip. So
``accelerate.Accelerator``, which Trainer creates, is one that knows the job, while the process is a rank of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import accelerate
from accelerate.optimizer import AcceleratedOptimizer
from shardwright.accelerate import Accelerator
from shardwright.half_precision import half_dtype
from shardwright.job.runtime import current_runtime
from shardwright.model import DistributedModel
from shardwright.model.models import Models
from shardwright.patches import replaced
from torch import nn


def take_part() -> None:
    """Let ``Trainer``, which is imported after this, create the accelerator of this job."""
    current_runtime().installed.enter_context(replaced(accelerate, {"Accelerator": AcceleratorOfTrainer}))


class AcceleratorOfTrainer(Accelerator):
    """The accelerator of ``transformers.Trainer`` on its path for the original library."""

    #: The model of the Trainer, which keeps only what it was given until it trains.
    _divided: ModelOfTrainer | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Create it; with the configuration keys ``fp16`` and ``bf16`` the model is cast, and nothing else."""
        if half_dtype(current_runtime().place.cfg) is not None:
            kwargs["mixed_precision"] = "no"
        super().__init__(*args, **kwargs)

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """Return the module that was given to :meth:`prepare`; None where Trainer asks whether to wrap the model.

        What Trainer wraps by itself gets no optimizer. A model that is told to be wrapped is given to :meth:`prepare`.
        """
        if not keep_torch_compile and not isinstance(model, DistributedModel):
            return None
        return super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Divide a model. For an evaluation it is returned as it is: steps find what was made of it."""
        divided = model if isinstance(model, DistributedModel) else divided_of(model)
        if divided is None:
            if self.device_placement if device_placement is None else device_placement:
                model = model.to(self.device)
            divided = self._divided = ModelOfTrainer(model)
        return model if evaluation_mode else super().prepare_model(divided)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Let an optimizer also have what ``smp.DistributedOptimizer`` has, which Trainer asks for."""
        prepared = super().prepare_optimizer(optimizer, device_placement)
        prepared.__class__ = OptimizerOfTrainer
        ModelOfTrainer.in_training = next(
            (weakref.ref(one) for one in _models() if prepared.optimizer.trains(one)), ModelOfTrainer.in_training
        )
        return prepared


class OptimizerOfTrainer(AcceleratedOptimizer):  # type: ignore[misc]
    """An optimizer that accelerate has prepared, with the other attributes of what it was made of."""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the ``smp.DistributedOptimizer``."""
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)


class ModelOfTrainer(DistributedModel):
    """The divided model of a Trainer, whose children are those of the module, as its parameters are.

    Trainer finds the parameters that decay by the names of children.
    """

    #: The model that is in training: of the last optimizer that was prepared.
    in_training: weakref.ref[ModelOfTrainer] | None = None

    def __init__(self, module: nn.Module) -> None:
        """Wrap a module. Gradients are reduced after every step, so that the last accumulation may be shorter."""
        super().__init__(module)
        self.__dict__["given"] = weakref.ref(module)
        self.__dict__["_parameters"] = self.module._parameters

    def children(self) -> Iterator[nn.Module]:
        """Return an iterator over the wrapped module alone."""
        yield self.module

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Return an iterator over the children of the wrapped module, with their names there."""
        return self.module.named_children()


def _models() -> list[ModelOfTrainer]:
    return [one for one in current_runtime()[Models].alive if isinstance(one, ModelOfTrainer)]


def divided_of(model: nn.Module) -> ModelOfTrainer | None:
    """Return what was made of a model that a Trainer was given; None before that."""
    return next((one for one in _models() if one.given() is model), None)


def model_in_training() -> ModelOfTrainer | None:
    """Return the model that a Trainer has begun to train last."""
    return None if ModelOfTrainer.in_training is None else ModelOfTrainer.in_training()
