"""Gradients that a module has before it is replaced, for the weights of the distributed module in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from shardwright.delayed.materialise import is_delayed

Weights = Callable[[], Mapping[str, torch.Tensor]]


def has_gradients(module: nn.Module) -> bool:
    """Whether a parameter of a module has a gradient."""
    return any(one.grad is not None for one in module.parameters() if not is_delayed(one))


@torch.no_grad()
def gradients_of(module: nn.Module, weights: Weights) -> dict[str, torch.Tensor] | None:
    """Return the gradients of a module's weights as they are named and laid out in a distributed one.

    Args:
        module: The module.
        weights: Returns the module's weights by the names of the distributed one, as they are now.

    Returns:
        Whole gradients by name, of weights of which a part has one, zero elsewhere. None if the weights are not the
        module's in another order, so that it is not known what their gradients are.
    """
    parameters = list(dict.fromkeys(module.parameters()))
    numbers: dict[nn.Parameter, torch.Tensor] = {}
    first = 1  # 0 is of what no parameter has, such as padding
    for one in parameters:
        counted = torch.arange(first, first + one.numel(), dtype=torch.float64, device=one.device)
        numbers[one], first = counted.view(one.shape), first + one.numel()
    with _in_place_of_parameters(module, numbers):
        buffers = {id(one) for one in module.buffers()}
        places = {name: value.detach().clone() for name, value in weights().items() if id(value) not in buffers}
    found = {name: value.long() for name, value in places.items()}
    every = torch.cat([value.flatten() for value in found.values()]) if found else torch.zeros(0)
    of_parameters = every[every != 0]
    is_reordered = all(torch.equal(value.double(), places[name].double()) for name, value in found.items())
    if not is_reordered or bool((every < 0).any()) or len(set(of_parameters.tolist())) != of_parameters.numel():
        return None
    if bool((every >= first).any()):
        return None
    device = every.device
    zero = torch.zeros(1, device=device)
    flat = torch.cat([zero, *(_flat(one) for one in parameters)])
    graded = torch.cat([zero, *(torch.full((one.numel(),), one.grad is not None).to(zero) for one in parameters)])
    return {name: flat[value] for name, value in found.items() if bool(graded[value].any())}


def _flat(parameter: nn.Parameter) -> torch.Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
    return gradient.detach().to_dense().flatten() if gradient.is_sparse else gradient.detach().flatten()


@contextmanager
def _in_place_of_parameters(module: nn.Module, tensors: Mapping[nn.Parameter, torch.Tensor]) -> Iterator[None]:
    stand_ins = {one: nn.Parameter(tensor, requires_grad=False) for one, tensor in tensors.items()}
    held = [(part, name, one) for part in module.modules() for name, one in part._parameters.items() if one is not None]
    try:
        for part, name, one in held:
            part._parameters[name] = stand_ins[one]
        yield
    finally:
        for part, name, one in held:
            part._parameters[name] = one
