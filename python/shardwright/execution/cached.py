"""Calls to other ranks that key/value caches are among the arguments or results of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from shardwright.caches import CacheAnswer, CacheHandle, CacheTable, Received, cache_class, holds_cache, replaced_in
from shardwright.errors import FrameError
from shardwright.execution.placed import placed_model

if TYPE_CHECKING:
    from shardwright.execution.call import RemoteModule
    from shardwright.job.runtime import Runtime

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


def outgoing(
    runtime: Runtime, target: RemoteModule, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, checkpointed: bool
) -> Arguments | None:
    """Return the arguments of a call with caches as they cross; None if there are none among them.

    Raises:
        FrameError: The call is one that runs again in backward, which would fill the cache a second time.
    """
    if not holds_cache((args, kwargs)):
        return None
    if checkpointed:
        raise FrameError(
            f"module {target.name!r}, which rank {target.rank} owns, is checkpointed, and was given a key/value cache, "
            "which it would fill a second time in backward: pass use_cache=False, or do not checkpoint it"
        )
    table, needed = runtime[CacheTable], _layers_in(runtime, target)
    with_gradients = torch.is_grad_enabled()

    def handle(cache: Any) -> CacheHandle:
        if not with_gradients:
            return table.handle(cache, target.rank, needed)
        crossing = table.by_value(cache, needed)
        table.spend(cache, needed, target.rank)
        return crossing

    kind = cache_class()
    assert kind is not None, "there is a cache"
    crossing: Arguments = replaced_in((args, dict(kwargs)), kind, handle)
    return crossing


def _layers_in(runtime: Runtime, target: RemoteModule) -> frozenset[int]:
    """Return the layers of a cache that a module fills: those whose numbers modules in it have."""
    known, key = runtime[CacheTable].layers_of_modules, (target.model_id, target.module_id)
    if key not in known:
        module = placed_model(runtime, target.model_id).module_of(target.module_id)
        numbers = (getattr(part, "layer_idx", None) for part in module.modules())
        known[key] = frozenset(number for number in numbers if isinstance(number, int))
    return known[key]


def incoming(runtime: Runtime, sender: int, args: Any, kwargs: Any) -> tuple[Any, Any, list[Received] | None]:
    """Return the arguments of a call with the caches that handles in it stand for.

    Returns:
        The arguments, and the caches whose changes the answer tells; None if the call was given no cache.
    """
    if not _holds_handle((args, kwargs)):
        return args, kwargs, None
    entered: list[Received] = []
    table = runtime[CacheTable]
    args, kwargs = replaced_in((args, kwargs), CacheHandle, lambda handle: table.received(handle, sender, entered))
    return args, kwargs, entered


def _holds_handle(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_handle(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_handle(item) for item in value)
    return isinstance(value, CacheHandle)


def without_caches(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of which changes are looked for; those of caches are told with the answer."""
    return tuple(value for value in (*args, *kwargs.values()) if not holds_cache(value))


def answered(runtime: Runtime, caller: int, result: Any, collected: Any, entered: list[Received]) -> tuple[Any, Any]:
    """Return a result with caches as they cross, and what is told with it, of a call that caches were given to."""
    table, kind = runtime[CacheTable], cache_class()
    if kind is not None and holds_cache(result):
        result = replaced_in(result, kind, lambda cache: table.handle(cache, caller, (), returned=True))
    return result, CacheAnswer(table.changes(entered, caller), collected)


def told(runtime: Runtime, sender: int, result: Any, told: Any) -> tuple[Any, Any]:
    """Take over what came with an answer; return its result, and what was collected."""
    if not isinstance(told, CacheAnswer):
        return result, told
    table = runtime[CacheTable]
    table.take(told.changes, sender)
    if _holds_handle(result):
        result = replaced_in(result, CacheHandle, lambda handle: table.received(handle, sender, [], returned=True))
    return result, told.collected
