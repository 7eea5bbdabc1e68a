"""Checkpointing of a single module, for a checkpoint around its caller that is applied to the modules inside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from shardwright.execution.layout import layouts_of, restride


def run_checkpointed(
    module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Run a module so that the backward recomputes it from copies of its arguments.

    The script's checkpoint begins before the arguments are computed. It recomputes them too, so later in-place writes
    to them do not matter. This checkpoint begins after they are computed, so it needs copies of their original values.

    Args:
        module: The module.
        run: The function that runs it.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Returns:
        The module's result.
    """
    if not torch.is_grad_enabled():
        return run(*args, **kwargs)
    leaves, structure = tree_flatten((args, dict(kwargs)))
    places: dict[int, int] = {}  # a tensor that is passed twice stays one tensor
    order = [places.setdefault(id(leaf), len(places)) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    needs = {place: leaf.requires_grad for place, leaf in zip(order, _tensors(leaves), strict=True)}
    copies = {place: leaf.detach().clone() for place, leaf in zip(order, _tensors(leaves), strict=True)}
    # The layout of the arguments decides which kernels run, and therefore what they save for the backward.
    strides = dict(layouts_of(_tensors(leaves)).get("strides", ()))
    layouts = {place: strides.get(index) for index, place in enumerate(order)}
    others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    are_tensors = [isinstance(leaf, torch.Tensor) for leaf in leaves]
    first: list[list[Any]] = [leaves]

    def again(_: nn.Module, *saved: torch.Tensor) -> Any:
        if first:
            own_args, own_kwargs = tree_unflatten(first.pop(), structure)
            return run(*own_args, **own_kwargs)
        # Copies that the module may write to, so that the saved tensors stay unchanged.
        made = [
            _Copy.apply(tensor.detach().requires_grad_(needs[place]), layouts[place])  # type: ignore[no-untyped-call]
            for place, tensor in enumerate(saved)
        ]
        tensors = iter(order)
        given = [
            made[next(tensors)] if is_tensor else other for is_tensor, other in zip(are_tensors, others, strict=True)
        ]
        own_args, own_kwargs = tree_unflatten(given, structure)
        return run(*own_args, **own_kwargs)

    del leaves
    # torch stops the recomputation with an exception, which TorchScript would turn into a different one.
    is_scripted = any(isinstance(part, torch.jit.ScriptModule) for part in module.modules())
    with set_checkpoint_early_stop(False) if is_scripted else nullcontext():
        return checkpoint(MethodType(again, module), *copies.values(), use_reentrant=False)


class _Copy(torch.autograd.Function):
    """Copy a tensor into a layout with the given strides; None keeps the tensor's layout."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, strides: list[int] | None) -> torch.Tensor:
        return tensor.clone() if strides is None else restride(tensor, strides)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def _tensors(leaves: list[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
