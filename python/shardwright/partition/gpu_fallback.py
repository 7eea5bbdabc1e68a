"""Traces on the CPU a module that needs an operation that only the GPU has."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from shardwright.partition.observe import Runner, run_plainly
from shardwright.partition.preserve import moved_to
from shardwright.partition.tree import ModelTree

_LOGGER = logging.getLogger("shardwright")


def runner_for(device: torch.device) -> Runner:
    """Return the runner of modules in a trace on `device`. A trace on the CPU falls back to the GPU if there is one."""
    if device.type == "cpu" and torch.cuda.is_available():
        return retrying_on(device, torch.device("cuda", torch.cuda.current_device()))
    return run_plainly


def retrying_on(device: torch.device, other: torch.device) -> Runner:
    """Return a runner that runs a module on `other` if `device` lacks an operation that the module needs."""

    def runner(module: nn.Module, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return function(*args, **kwargs)
        except RuntimeError as problem:
            if not _is_unsupported(problem):
                raise
            _LOGGER.debug("%s is traced on %s: %s", type(module).__name__, other, problem)
            with moved_to(ModelTree.of(module), other):
                moved_args, moved_kwargs = tree_map(_mover(other), (args, kwargs))
                result = function(*moved_args, **moved_kwargs)
            return tree_map(_mover(device), result)

    return runner


def _mover(device: torch.device) -> Callable[[Any], Any]:
    return lambda item: item.to(device) if isinstance(item, torch.Tensor) else item


def _is_unsupported(problem: RuntimeError) -> bool:
    return isinstance(problem, NotImplementedError) or "not implemented for" in str(problem)
