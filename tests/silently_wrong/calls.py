"""Calls inside a step that torch would run on a part of the graph, or of the model."""

from __future__ import annotations

import copy
from typing import Any

import shardwright as smp
import torch
from torch import nn
from torch.autograd import backward as imported_backward
from torch.autograd import grad as imported_grad

from tests.silently_wrong.scenario import (
    MICROBATCHES,
    compare_gradients,
    divided,
    plain_step,
    scenario,
    square,
    step_of,
    train,
)
from tests.silently_wrong.stages import TwoStages, batch


@scenario
def a_plain_step() -> Any:
    return train(TwoStages(), square)


@scenario
def backward_of_the_loss() -> Any:
    return train(TwoStages(), square, backward=lambda model, value: value.backward())


@scenario
def backward_imported_by_name() -> Any:
    return train(TwoStages(), square, backward=lambda model, value: imported_backward(value))


@scenario
def backward_with_create_graph() -> Any:
    return train(TwoStages(), square, backward=lambda model, value: value.backward(create_graph=True))


@scenario
def model_backward_with_create_graph() -> Any:
    return train(TwoStages(), square, backward=lambda model, value: model.backward(value, create_graph=True))


@scenario
def autograd_grad_of_parameters() -> Any:
    def backward(model: Any, value: torch.Tensor) -> None:
        torch.autograd.grad(value, list(model.local_parameters()))

    return train(TwoStages(), square, backward=backward)


@scenario
def autograd_grad_imported_by_name() -> Any:
    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        value = model(x).square().mean()
        (gradient,) = imported_grad(value, [x], allow_unused=True)
        return value if gradient is None else value + gradient.square().sum()

    return train(TwoStages(), loss)


@scenario
def a_gradient_penalty() -> Any:
    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        value = model(x).square().mean()
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        return value + gradient.square().sum()

    return train(TwoStages(), loss)


@scenario
def torch_func_grad() -> Any:
    return train(TwoStages(), lambda model, x: torch.func.grad(lambda x: model(x).square().mean())(x).sum())


@scenario
def the_gradient_of_an_input_made_in_the_step() -> Any:
    plain = TwoStages()
    model = divided(copy.deepcopy(plain))

    @smp.step
    def step(model: Any, x: torch.Tensor) -> Any:
        x = x.clone().requires_grad_()
        model.backward(square(model, x))
        return x.grad

    found = step(model, batch()).concat()
    whole = [part.clone().requires_grad_() for part in batch().chunk(MICROBATCHES)]
    for part in whole:
        square(plain, part).backward()
    torch.testing.assert_close(found, torch.cat([part.grad for part in whole]))
    for parameter in plain.parameters():
        parameter.grad /= MICROBATCHES
    return compare_gradients(model, plain)


@scenario
def a_batch_that_needs_a_gradient() -> Any:
    plain = TwoStages()
    model = divided(copy.deepcopy(plain))
    x = batch().requires_grad_()
    step_of()(model, x)
    return float(x.grad.sum()) if x.grad is not None else None


class LearnedLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return (y * self.weight).square().mean()


@scenario
def a_loss_module_with_parameters_outside_the_model() -> Any:
    criterion = LearnedLoss()
    return train(TwoStages(), lambda model, x: criterion(model(x)))


@scenario
def a_learned_tensor_outside_the_model() -> Any:
    scale = torch.ones((), requires_grad=True)
    return train(TwoStages(), lambda model, x: (model(x) * scale).square().mean())


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.criterion = TwoStages(), LearnedLoss()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.criterion(self.net(x))


@scenario
def a_loss_module_inside_the_model() -> Any:
    return train(WithLoss(), lambda model, x: model(x), net__there=1)


@scenario
def zero_grad_in_the_step() -> Any:
    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        return square(model, x)

    plain = TwoStages()
    model = divided(copy.deepcopy(plain))
    step_of(loss)(model, batch())
    plain_step(plain, batch(), square)
    return compare_gradients(model, plain)


def _optimized(wrap: bool, act: str) -> Any:
    module = TwoStages()
    model = divided(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if wrap:
        optimizer = smp.DistributedOptimizer(optimizer)

    @smp.step
    def step(model: Any, x: torch.Tensor) -> None:
        if act == "zero_grad":
            optimizer.zero_grad()
        model.backward(square(model, x))
        if act == "step":
            optimizer.step()

    step(model, batch())
    return "nothing"


@scenario
def optimizer_step_in_the_step() -> Any:
    return _optimized(True, "step")


@scenario
def optimizer_zero_grad_in_the_step() -> Any:
    return _optimized(True, "zero_grad")


@scenario
def step_of_an_unwrapped_optimizer_in_the_step() -> Any:
    return _optimized(False, "step")


@scenario
def zero_grad_of_an_unwrapped_optimizer_in_the_step() -> Any:
    return _optimized(False, "zero_grad")


@scenario
def a_gradient_of_another_rank_read_in_the_step() -> Any:
    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        # All of them: what this rank holds may have its gradient already, of the microbatch before.
        gradients = [parameter.grad for parameter in model.parameters()]
        assert gradients
        return square(model, x)

    return train(TwoStages(), loss)
