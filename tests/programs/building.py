"""Builds the modules of a program from their description."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.programs.blocks import WIDTH, Block
from tests.programs.layers import make_layer
from tests.programs.log import log_of_run

#: A module as data: a block with its parts, a layer, or a module used again.
Spec = dict[str, Any]


def build(spec: Spec, made: dict[int, nn.Module]) -> nn.Module:
    """The module of a spec; ``made`` gathers blocks by key."""
    if "again" in spec:
        return made[spec["again"]]
    width = spec.get("width", WIDTH)
    if "layer" in spec:
        return make_layer(spec["layer"], width, spec.get("activations", ()))
    children = [build(part, made) for part in spec["parts"]]
    block = made[spec["key"]] = Block(spec["operations"], spec["result"], children, width)
    if "tied" in spec and made[spec["tied"]].weight.shape == block.weight.shape:
        block.weight = made[spec["tied"]].weight
    for kind in spec.get("hooked", ()):
        _HOOKS[kind](block)
    return block


def _before(module: nn.Module, args: Any) -> Any:
    log_of_run[0].saw("hooks of modules")
    return tuple(arg * 0.9 if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg for arg in args)


def _after(module: nn.Module, args: Any, result: Any) -> Any:
    log_of_run[0].saw("hooks of modules")
    return result * 1.1 if isinstance(result, torch.Tensor) and result.is_floating_point() else None


def _backward(module: nn.Module, given: Any, wanted: Any) -> Any:
    log_of_run[0].saw("hooks of modules")
    return tuple(None if gradient is None else gradient * 0.9 for gradient in given)


#: Hooks of modules that a block may have.
_HOOKS = {
    "before": lambda module: module.register_forward_pre_hook(_before),
    "after": lambda module: module.register_forward_hook(_after),
    "backward": lambda module: module.register_full_backward_hook(_backward),
}
