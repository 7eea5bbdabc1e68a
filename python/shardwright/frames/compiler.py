"""Exclude functions of the library from ``torch.compile``."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_set_eval_frame: Callable[[Any], Any] = torch._C._dynamo.eval_frame.set_eval_frame
#: Functions whose own code is not compiled, and that are not registered with the compiler yet.
_unregistered: list[Callable[..., Any]] = []


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Exclude a function from tracing and compilation."""
    assert isinstance(function, FunctionType), "it has code"
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    _unregistered.append(function)
    return function


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Exclude a function and all functions that it calls from tracing and compilation."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        compiling = _set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            _set_eval_frame(compiling)

    return untraced(run)


def register_with_compiler() -> None:
    """Register these functions with the compiler once the script has imported it, which takes seconds."""
    if _unregistered:
        decorators = sys.modules.get("torch._dynamo.decorators")
        if decorators is not None and hasattr(decorators, "skip"):  # False while the module is still being imported
            while _unregistered:
                decorators.skip(_unregistered.pop())
