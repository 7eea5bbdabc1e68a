"""What scenarios share: a registry, how they train, and the comparison with plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import shardwright as smp
import torch
from torch import nn

from tests.silently_wrong.stages import TwoStages, batch

MICROBATCHES = 2

#: The scenarios by name; each runs on both ranks of a pipeline.
SCENARIOS: dict[str, Callable[[], Any]] = {}


def scenario(function: Callable[[], Any]) -> Callable[[], Any]:
    """Register a scenario under its name, with spaces."""
    SCENARIOS[function.__name__.replace("_", " ")] = function
    return function


@dataclass(frozen=True)
class Exact:
    """A scenario that compared: the worst relative difference, and of how many tensors."""

    worst: float
    compared: int


def divided(module: nn.Module, **owners: int) -> smp.DistributedModel:
    """The module over two ranks: children by name on the pp_ranks given, the rest on 0."""
    smp.set_partition(module, 0)
    for name, pp_rank in (owners or {"there": 1}).items():
        smp.set_partition(module.get_submodule(name.replace("__", ".")), pp_rank)
    return smp.DistributedModel(module)


def square(model: Any, x: torch.Tensor) -> torch.Tensor:
    """A loss."""
    return model(x).square().mean()


def step_of(loss: Callable[[Any, torch.Tensor], torch.Tensor] = square) -> Callable[[Any, torch.Tensor], Any]:
    """A new step function that trains on this loss."""

    @smp.step
    def step(model: Any, x: torch.Tensor) -> None:
        model.backward(loss(model, x))

    return step


def plain_step(module: nn.Module, x: torch.Tensor, loss: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    """The same step in plain torch: the mean over microbatches; returns the losses."""
    losses = []
    for part in x.chunk(MICROBATCHES):
        value = loss(module, part)
        (value / MICROBATCHES).backward()
        losses.append(value.detach())
    return losses


def differences(found: Mapping[str, torch.Tensor | None], expected: Mapping[str, torch.Tensor | None]) -> Exact:
    """Compare what this rank has with what plain torch has."""
    worst = 0.0
    # What is zero but for rounding, such as the gradient of a key's bias in attention, is measured by the others.
    floor = 1e-3 * max((float(value.abs().max()) for value in expected.values() if value is not None), default=1.0)
    for name, value in found.items():
        wanted = expected[name]
        assert (value is None) == (wanted is None), f"{name}: {value} for {wanted}"
        if value is None or wanted is None:
            continue
        assert value.shape == wanted.shape, f"{name}: {value.shape} for {wanted.shape}"
        scale = max(float(wanted.abs().max()), floor) or 1.0
        worst = max(worst, float((value - wanted).abs().max()) / scale)
    return Exact(worst, len(found))


def compare_gradients(model: smp.DistributedModel, plain: nn.Module) -> Exact:
    """The gradients that this rank holds, against those of a plain copy."""
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    return differences({name: parameter.grad for name, parameter in model.local_named_parameters()}, expected)


def train_both(model: smp.DistributedModel, plain: nn.Module) -> None:
    """One step of the model and of a plain copy on the square loss."""
    step_of()(model, batch())
    plain_step(plain, batch(), square)


def train(
    module: nn.Module,
    loss: Callable[[Any, torch.Tensor], torch.Tensor],
    *,
    backward: Callable[[Any, torch.Tensor], None] = lambda model, value: model.backward(value),
    **owners: int,
) -> Exact:
    """One step of the module divided and of a plain copy; compares gradients."""
    plain = copy.deepcopy(module)
    model = divided(module, **owners)

    @smp.step
    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        value = loss(model, x)
        backward(model, value)
        return value

    step(model, batch())
    plain_step(plain, batch(), loss)
    return compare_gradients(model, plain)


def train_changing(change: Callable[[Any], object], module: nn.Module | None = None) -> Exact:
    """`train` two stages, or this module, in a step function that first changes the model in this way."""

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        change(model)
        return square(model, x)

    return train(TwoStages() if module is None else module, loss)


def inner(model: Any) -> Any:
    """The module that a model divides; a plain one is its own."""
    return getattr(model, "module", model)
