"""Variables outside a step function that it assigns: microbatches take turns in the middle of it."""

from __future__ import annotations

import dis
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwright.job.runtime import Runtime


def assigned_outside(function: Callable[..., Any]) -> list[str]:
    """The names that a function declares ``global`` or ``nonlocal`` and assigns, in the order of their first use."""
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
    """Warn of them on the rank that runs the function."""
    names = assigned_outside(function)
    if names:
        runtime.logger.warning(
            "%s assigns %s, which it shares with its other microbatches: these take turns wherever it calls a module "
            "on another rank, and find what another one has left there. Return values instead, and add them up outside "
            "the step function; what has to be counted within it belongs into a module",
            name,
            " and ".join(names),
        )
