"""Reentrant checkpoints: torch differentiates the second computation, a frame differentiates the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._pytree import tree_leaves

from shardwright.errors import FrameError
from shardwright.frames.cut import engine_watchers


def run_reentrant(function: Callable[..., Any], args: tuple[Any, ...], *, preserve_rng_state: bool) -> Any:
    """Run a function with a non-reentrant checkpoint, which is equivalent if both computations agree.

    The backward by levels requests the gradients at certain edges, which reentrant checkpoints refuse. They also lose
    the gradients of tensors that are not results of the function, such as outputs collected by hooks.

    Raises:
        FrameError: In the backward, if the function changed the state of modules and the results of the second
            computation differ from those of the first.
    """
    # The whole function runs again, as in a reentrant checkpoint, so that its last changes of state are repeated too.
    with torch_checkpoint.set_checkpoint_early_stop(False):
        return torch_checkpoint.checkpoint(
            Compared(function), *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )


class Compared:
    """A function whose two runs must have equal results if the first run changed the state of modules."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Wrap the function, without running it."""
        self.func = function
        self._has_run = False
        self._outputs: list[torch.Tensor] | None = None

    def __call__(self, *args: Any) -> Any:
        """Run the function, and compare the results in the second run."""
        if self._has_run:
            result = self.func(*args)
            self._compare(result)
            return result
        self._has_run = True
        before = [(one, one.seen()) for one in engine_watchers]
        result = self.func(*args)
        if any(seen is not None and one.values_changed(seen) for one, seen in before):
            self._outputs = [tensor.detach().clone() for tensor in _tensors(result)]
        return result

    def _compare(self, result: Any) -> None:
        if self._outputs is None:
            return
        tensors = _tensors(result)
        if len(tensors) == len(self._outputs) and all(map(_are_equal, self._outputs, tensors)):
            return
        name = getattr(self.func, "__qualname__", type(self.func).__name__)
        raise FrameError(
            f"{name} changed what a module keeps inside torch.utils.checkpoint(use_reentrant=True), and computed "
            "something else with it when it was computed again in the backward: torch would differentiate that, and "
            "not what the loss was made of. Give checkpoint use_reentrant=False, or change what is kept outside of it"
        )


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.layout is not torch.strided:
        return one.shape == other.shape
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())
