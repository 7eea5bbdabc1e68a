"""Methods of a wrapped module that call it: ``generate`` of ``transformers``, for example."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from shardwright.caches import copied
from shardwright.execution.task import running_task
from shardwright.job.runtime import Runtime

if TYPE_CHECKING:
    from shardwright.model.distributed import DistributedModel

Method = Callable[["DistributedModel", tuple[Any, ...], Mapping[str, Any]], Any]

#: What a trace leaves out of ``generate``: all tokens but two, the first and one that has a cache.
_OF_TRACE = {"max_new_tokens": 2, "min_new_tokens": 0}
_LENGTHS = ("max_length", "min_length")


class MethodsOutside:
    """Methods that are steps of their own where code outside of steps calls them, by name."""

    def __init__(self, methods: Mapping[str, Method]) -> None:
        """Of these."""
        self.methods = methods


def method_of(runtime: Runtime, model: DistributedModel, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a divided model: ``own`` of its module, which divides the model first if needed."""
    if running_task() is None:
        outside = runtime[MethodsOutside].methods.get(name) if _generates(model) else None
        return own if outside is None else functools.wraps(own)(lambda *args, **kwargs: outside(model, args, kwargs))

    @functools.wraps(own)
    def method(*args: Any, **kwargs: Any) -> Any:
        traced = kwargs
        if name == "generate" and _generates(model):
            kwargs.setdefault("disable_compile", True)  # parts of the model are on other ranks
            traced = {key: value for key, value in kwargs.items() if key not in _LENGTHS} | _OF_TRACE
        model._enter(copied(own, args, traced))
        with model.generating.running(model.module) if name == "generate" else nullcontext():
            return getattr(model.module, name)(*args, **kwargs)

    return method


def _generates(model: DistributedModel) -> bool:
    """Return whether a model's ``generate`` is that of ``transformers``."""
    return getattr(model.module, "generation_config", None) is not None
