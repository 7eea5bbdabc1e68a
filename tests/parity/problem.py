"""What is compared: models, the phases of a training step written once for split and whole models, and batches."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

#: Models by name: distributed ones under test, `Whole` ones in the reference.
Models = Mapping[str, Any]
#: A step function: ``function(models, *batch)`` returns outputs and calls ``models[...].backward``.
StepBody = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One call of a step function within a training step.

    Attributes:
        body: The step function.
        training: Runs in train mode and with gradients; else in eval mode under ``no_grad``.
        zero: The models whose gradients are cleared before.
        update: The models whose optimizers step after it.
        whole: Names of the body's arguments that every microbatch gets whole.
        axes: Axes along which other arguments than the usual are split.
    """

    body: StepBody
    training: bool = True
    zero: tuple[str, ...] = ("model",)
    update: tuple[str, ...] = ("model",)
    whole: tuple[str, ...] = ()
    axes: Mapping[str, int] = field(default_factory=dict)


def sgd(learning_rate: float = 0.05, momentum: float = 0.0) -> Callable[[nn.Module], Optimizer]:
    """Plain gradient descent, which amplifies no error."""
    return lambda model: SGD(model.parameters(), lr=learning_rate, momentum=momentum)


_PLAIN = sgd()


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Models and how they are trained.

    Attributes:
        build: Makes the models; called after seeding, in float64.
        batch: The arguments of the step function after the models, for one replica: from the training step and a
            seeded generator. Its first axis has `BATCH` samples.
        phases: The calls of each training step.
        pins: Where modules go for a pipeline degree, by ``"model.path.in.it"``; everything else goes to pp_rank 0.
            None divides automatically.
        requests: How many forward requests one microbatch of each phase sends, where the exact number matters.
        optimizer: Makes the optimizer of a model, distributed or whole.
        scheduler: Makes the optimizer's learning rate schedule, if it has one.
        clip: The largest norm of the gradients, if they are clipped.
        prepare: Changes a module before a training step: freezes a part of it, say.
        accounted: Whether bytes are compared with the partition table.
        passes_per_step: ``backward_passes_per_step`` of the models.
    """

    build: Callable[[], dict[str, nn.Module]]
    batch: Callable[[int, torch.Generator], tuple[Any, ...]]
    phases: tuple[Phase, ...]
    pins: Callable[[int], dict[str, int]] | None = None
    requests: Callable[[int], int] | None = None
    optimizer: Callable[[nn.Module], Optimizer] = _PLAIN
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    clip: float | None = None
    prepare: Callable[[nn.Module, int], None] | None = None
    accounted: bool = False
    passes_per_step: int = 1


BATCH = 8


def generator(name: str, step: int, phase: int, replica: int) -> torch.Generator:
    """The source of a batch: the same on every rank, different for every replica."""
    seed = zlib.crc32(f"{name} {step} {phase} {replica}".encode())
    return torch.Generator().manual_seed(seed)


def one(build: Callable[[], nn.Module]) -> Callable[[], dict[str, nn.Module]]:
    """The builder of a problem with one model."""
    return lambda: {"model": build()}


def normal(*shape: int) -> Callable[[int, torch.Generator], tuple[torch.Tensor, ...]]:
    """Batches of one normally distributed tensor with this shape behind the samples."""
    return lambda step, random: (torch.randn(BATCH, *shape, generator=random),)


def square_loss(models: Models, x: torch.Tensor) -> Any:
    """A step for models of one tensor that give one tensor."""
    output = models["model"](x)
    loss = output.square().mean()
    models["model"].backward(loss)
    return loss, output


def own_loss(models: Models, *inputs: Any, results: tuple[str, ...] = ("logits",), **named_inputs: Any) -> Any:
    """A step on the loss that the model computes itself; returns it, and these results of the model."""
    output = models["model"](*inputs, **named_inputs)
    models["model"].backward(output.loss)
    return output.loss, *(getattr(output, result) for result in results)
