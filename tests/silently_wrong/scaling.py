"""Loss scaling: gradients that overflow on one rank only."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import shardwright as smp
import torch
from torch import nn

from tests.silently_wrong.scenario import MICROBATCHES, Exact, differences, divided, scenario, square
from tests.silently_wrong.stages import TwoStages, batch

_STEPS = 4
_Optimizers = Callable[[nn.Module], list[torch.optim.Optimizer]]


def _scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)


def _one(module: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)]


def _update(
    scaler: torch.amp.GradScaler,
    optimizers: list[torch.optim.Optimizer],
    parameters: Iterable[tuple[str, nn.Parameter]],
    number: int,
) -> None:
    """Scaled gradients of the second step overflow, in a part of the model."""
    for name, parameter in parameters:
        if number == 1 and name.startswith("there"):
            assert parameter.grad is not None
            parameter.grad[0] = float("inf")
    for optimizer in optimizers:
        if number % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
    scaler.update()
    for optimizer in optimizers:
        optimizer.zero_grad()


def _train(make: _Optimizers = _one) -> Exact:
    plain = TwoStages()
    model = divided(copy.deepcopy(plain))
    scalers = [_scaler(), _scaler()]
    optimizers = [[smp.DistributedOptimizer(optimizer) for optimizer in make(model.module)], make(plain)]

    @smp.step
    def step(model: Any, x: torch.Tensor) -> None:
        model.backward(scalers[0].scale(square(model, x)))

    for number in range(_STEPS):
        step(model, batch(number))
        _update(scalers[0], optimizers[0], model.local_named_parameters(), number)
        for part in batch(number).chunk(MICROBATCHES):
            (scalers[1].scale(square(plain, part)) / MICROBATCHES).backward()
        _update(scalers[1], optimizers[1], plain.named_parameters(), number)
        assert scalers[0].state_dict() == scalers[1].state_dict(), number
    return differences(dict(model.local_named_parameters()), dict(plain.named_parameters()))


@scenario
def a_gradient_scaler() -> Any:
    return _train()


@scenario
def a_gradient_scaler_and_a_fused_optimizer() -> Any:
    return _train(lambda module: [torch.optim.SGD(module.parameters(), lr=0.1, fused=True)])


@scenario
def a_gradient_scaler_and_an_optimizer_for_each_stage() -> Any:
    return _train(lambda module: [torch.optim.SGD(stage.parameters(), lr=0.1) for stage in module.children()])


def _in_the_step(act: Callable[[torch.amp.GradScaler, torch.optim.Optimizer], None]) -> Any:
    model = divided(TwoStages())
    scaler, optimizer = _scaler(), smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step(model: Any, x: torch.Tensor) -> None:
        model.backward(scaler.scale(square(model, x)))
        act(scaler, optimizer)

    return step(model, batch())


@scenario
def a_gradient_scaler_that_unscales_in_the_step() -> Any:
    return _in_the_step(lambda scaler, optimizer: scaler.unscale_(optimizer))


@scenario
def a_gradient_scaler_that_is_updated_in_the_step() -> Any:
    return _in_the_step(lambda scaler, optimizer: scaler.update())


@scenario
def a_gradient_scaler_whose_scale_is_set_in_the_step() -> Any:
    return _in_the_step(lambda scaler, optimizer: scaler.update(2.0))
