"""Code that ``torch.compile`` has no business in, though it runs in the middle of what is compiled."""

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
#: Functions whose own code is not compiled, and that the compiler has not been told of.
_unregistered: list[Callable[..., Any]] = []


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Have the compiler not trace a function into what it compiles, nor compile the function's own code."""
    assert isinstance(function, FunctionType), "it has code"
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    _unregistered.append(function)
    return function


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """The same for a function and for all that it calls."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        compiling = _set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            _set_eval_frame(compiling)

    return untraced(run)


def register_with_compiler() -> None:
    """Tell the compiler of these functions, once the script has loaded it: that takes long, so it is not done here."""
    if _unregistered:
        decorators = sys.modules.get("torch._dynamo.decorators")
        if decorators is not None and hasattr(decorators, "skip"):  # and not half loaded
            while _unregistered:
                decorators.skip(_unregistered.pop())
