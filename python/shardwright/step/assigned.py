"""Warns of outer variables that a step function assigns. Microbatches may take turns between two uses of them."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from typing import Any

from shardwright.job.runtime import Runtime


def assigned_outside(function: Callable[..., Any]) -> list[str]:
    """Return the ``global`` and ``nonlocal`` names that a function assigns, in the order of first assignment."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return []
    names: dict[str, None] = {}
    for instruction in dis.get_instructions(code):
        is_global = instruction.opname == "STORE_GLOBAL"
        if is_global or (instruction.opname == "STORE_DEREF" and instruction.argval in code.co_freevars):
            names[str(instruction.argval)] = None
    return list(names)


def warn_of_assigned(runtime: Runtime, name: str, function: Callable[..., Any]) -> None:
    """Log a warning about such variables. Call it on the rank that runs the function."""
    names = assigned_outside(function)
    if names:
        runtime.logger.warning(
            "%s assigns %s, which it shares with its other microbatches: these take turns wherever it calls a module "
            "on another rank, and find what another one has left there. Return values instead, and add them up outside "
            "the step function; what has to be counted within it belongs into a module",
            name,
            " and ".join(names),
        )
