"""Calls of a forward that cannot go to another rank, so that caller and callee must be on the same rank."""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

from shardwright import _core
from shardwright.caches import holds_cache
from shardwright.delayed.shapes import ShapeTensor
from shardwright.errors import UnsupportedValueError
from shardwright.execution import forward_mode
from shardwright.execution.context import saved_tensor_hooks_are_set
from shardwright.execution.sparse import has_parts, refuse_parts
from shardwright.patches import replaced
from shardwright.values.registry import registry
from shardwright.values.tensors import refuse_kind

_CODE = (types.FunctionType, types.MethodType, functools.partial, nn.Module, Iterator)


def stays_here(values: object) -> str | None:
    """Return why arguments or results cannot go to another rank; None if all of them can.

    Functions, iterators and modules cannot, because their code would run there; neither can values of unknown types,
    nor tensors of kinds that cannot be sent as bytes. Key/value caches are not considered: a call that would carry one
    raises an error with an alternative, whereas keeping the layers together for it would prevent the division of the
    model.
    """
    code: list[object] = [leaf for leaf in tree_leaves(values) if isinstance(leaf, _CODE)]
    if code:
        return type(code[0]).__name__
    if holds_cache(values):
        return None
    try:
        _, tensors = _core.flatten(values, registry)
        for tensor in tensors:
            if has_parts(tensor):
                refuse_parts(tensor, "it")
            elif not isinstance(tensor, ShapeTensor):
                refuse_kind(tensor)
    except UnsupportedValueError as error:
        return f"{error.kind}, which cannot cross ranks"
    return None


class Regions:
    """Determines whether the traced forward is in a region where no call can leave the rank, and why."""

    def __init__(self, *, saves_tensors: bool) -> None:
        """Start outside any region. The trace itself may have installed hooks on saved tensors."""
        self._saves_tensors = saves_tensors
        self._functions: list[str] = []

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Detect the custom autograd functions whose forward this thread runs."""
        original = torch.autograd.Function.__dict__["apply"]
        thread = threading.get_ident()

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            # Calls inside PyTorch's own checkpoints may leave the rank, because those are translated.
            if threading.get_ident() != thread or cls.__module__ == "torch.utils.checkpoint":
                return original.__get__(None, cls)(*args, **kwargs)
            self._functions.append(cls.__name__)
            try:
                return original.__get__(None, cls)(*args, **kwargs)
            finally:
                self._functions.pop()

        with replaced(torch.autograd.Function, {"apply": classmethod(apply)}):
            yield

    def why_whole(self, arguments: object) -> str | None:
        """Return why a call made now with these arguments must stay on its rank; None if it need not."""
        foreign = stays_here(arguments)
        if foreign is not None:
            return f"calls it with a {foreign}"
        if torch._C._functorch.peek_interpreter_stack() is not None or forward_mode.is_entered():
            return "calls it under a torch.func transform or forward-mode differentiation"
        if self._functions:
            return f"calls it inside the custom function {self._functions[-1]}, which may call it again in backward"
        if parametrize._cache_enabled:
            return "calls it inside parametrize.cached()"
        if not self._saves_tensors and saved_tensor_hooks_are_set():
            return "calls it inside saved_tensors_hooks"
        return None
