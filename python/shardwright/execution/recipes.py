"""Recipes: how the requester obtains results from tensors that it already has, as described by the executing rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from shardwright import _core

_creation_of: Callable[[torch.Tensor], Any] = torch._C._autograd._get_creation_meta
_Creation: Any = torch._C._autograd.CreationMeta


def replayable_base(tensor: torch.Tensor, replay: bool) -> torch.Tensor | None:
    """Return the base of a view that the requester can recreate from the base's memory by strides; None otherwise."""
    base = tensor._base if tensor._is_view() else None
    if base is None or tensor.dtype != base.dtype or (tensor.requires_grad and not replay):
        return None
    creation = _creation_of(tensor)
    if creation == _Creation.INFERENCE_MODE and torch.is_inference_mode_enabled():  # requester's mode too
        return base
    if creation in (_Creation.IN_CUSTOM_FUNCTION, _Creation.INFERENCE_MODE):
        return None
    if creation == _Creation.MULTI_OUTPUT_NODE and _passes_custom_function(tensor, base):
        return None
    return base


def _passes_custom_function(tensor: torch.Tensor, base: torch.Tensor) -> bool:
    """Return whether a custom function or a backward hook of a module is between a view and its base in the graph.

    A custom function with several results that returns an argument creates a view of it with the same creation
    metadata as ``chunk``.
    """
    try:
        node, last = tensor.grad_fn, base.grad_fn
    except RuntimeError:  # the base of several views was written to: they are not results of a custom function
        return False
    while node is not None and node is not last:
        if isinstance(node, BackwardCFunction):
            return True
        following = node.next_functions
        node = following[0][0] if len(following) == 1 else None
    return False


def view_of(tensor: torch.Tensor, base: torch.Tensor) -> _core.View:
    """Return the description from which a tensor is recreated as a view of its base."""
    return _core.View(
        tensor.shape,
        tensor.stride(),
        int(tensor.storage_offset()) - int(base.storage_offset()),
        conjugated=tensor.is_conj() != base.is_conj(),
        negated=tensor.is_neg() != base.is_neg(),
        grad_mode=bool(_creation_of(tensor) not in (_Creation.NO_GRAD_MODE, _Creation.INFERENCE_MODE)),
    )


def follow(recipe: _core.Recipe, given: list[torch.Tensor], results: list[torch.Tensor]) -> torch.Tensor:
    """Return the argument that a recipe names, or create the view of an argument or result that it describes."""
    if recipe.result is not None:
        base = results[recipe.result]
    else:
        assert recipe.argument is not None, "a recipe names an argument or a result"
        base = given[recipe.argument]
    view = recipe.view
    if view is None:
        return base
    with torch.set_grad_enabled(view.grad_mode):
        made = base.as_strided(view.shape, view.strides, base.storage_offset() + view.offset)
        if view.conjugated:
            made = made.conj()
        return torch._neg_view(made) if view.negated else made
