"""``smp.DistributedOptimizer``, which takes a loss scale where losses are not scaled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import shardwright
from shardwright.half_precision.loss_scaler import scaler_of
from shardwright.job.runtime import find_runtime
from shardwright.logs import warn_once
from torch.optim import Optimizer


def wrap(
    optimizer: Optimizer,
    static_loss_scale: float | None = 1.0,
    dynamic_loss_scale: bool = False,
    dynamic_loss_args: Mapping[str, Any] | None = None,
    **keys: Any,
) -> Any:
    """Make an optimizer work on a partitioned model; see ``shardwright.DistributedOptimizer``.

    A loss scale that does nothing is taken, and rank 0 logs it once: without ``fp16``, and ``dynamic_loss_args``
    without ``dynamic_loss_scale``.

    Raises:
        ConfigError: An argument is not allowed.
    """
    runtime = find_runtime()
    given = {**(dynamic_loss_args or {}), **keys} if keys else dynamic_loss_args
    scaler_of(static_loss_scale, False, None, is_float16=True)  # what would be refused with fp16 is not overlooked
    scaler_of(None, dynamic_loss_scale, given if dynamic_loss_scale else None, is_float16=True)
    idle: list[str] = []
    if given and not dynamic_loss_scale:
        scaler_of(None, True, given, is_float16=True)
        idle, why = ["dynamic_loss_args"], "dynamic_loss_scale is False"
        given = None
    if runtime is None or not runtime.place.cfg.fp16:
        named = {
            "static_loss_scale": static_loss_scale not in (None, 1.0),
            "dynamic_loss_scale": dynamic_loss_scale,
            "dynamic_loss_args": bool(given) or bool(idle),
        }
        idle = [name for name, differs in named.items() if differs]
        why = "losses are scaled in a job with fp16 only"
        static_loss_scale, dynamic_loss_scale, given = None, False, None
    if idle and (runtime is None or runtime.place.rank == 0):
        warn_once(f"smp.DistributedOptimizer was given {', '.join(idle)}, without effect here: {why}")
    make: Any = shardwright.DistributedOptimizer  # a call of it wraps
    return make(optimizer, static_loss_scale, dynamic_loss_scale, given)


class _Wrapping(type(shardwright.DistributedOptimizer)):  # type: ignore[misc]
    """Makes a call wrap an optimizer, and every wrapped optimizer an instance."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return wrap(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, shardwright.DistributedOptimizer)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, shardwright.DistributedOptimizer)


class DistributedOptimizer(shardwright.DistributedOptimizer, metaclass=_Wrapping):
    """Makes an optimizer work on a partitioned model; see :func:`wrap`, which a call of it is."""
