"""A ``step`` that a script, or a library, has put into an optimizer in place of that of its class."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from shardwright.errors import ConfigError
from shardwright.job.runtime import Runtime, find_runtime
from shardwright.model.models import Models
from shardwright.model.updates import Updates
from shardwright.optimizer.half_precision import HalfPrecision
from shardwright.optimizer.reach import may_divide

#: Marks a function that watches what has taken the place of a step, by itself.
_WATCHED = "_shardwright_watched"


def counts_steps_only(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's own ``step`` is what a learning-rate scheduler has put there to count its steps."""
    bound: Any = vars(optimizer).get("step")
    return hasattr(bound, "_wrapped_by_lr_sched") and getattr(bound, "__wrapped__", None) is type(optimizer).step


def refuse_replaced_step(optimizer: Optimizer, runtime: Runtime, *, has_masters: bool) -> None:
    """Check that nothing updates past ``smp.DistributedOptimizer``, which is about to wrap an optimizer.

    Raises:
        ConfigError: The optimizer has a ``step`` of its own, which would call that of its class.
    """
    bound: Any = vars(optimizer).get("step")
    if bound is None or counts_steps_only(optimizer) or not (has_masters or may_divide(runtime)):
        return
    raise ConfigError(
        f"smp.DistributedOptimizer was given {type(optimizer).__name__} whose step was replaced by {_name(bound)}, "
        "which would update past it, so that ranks have different weights. Replace step afterwards, by a function that "
        f"calls the step that it replaces, or put it into a subclass of {type(optimizer).__name__}"
    )


class ReplaceableStep(Optimizer):
    """What ``smp.DistributedOptimizer`` adds so that a ``step`` that is put into it later calls the one before.

    Schedulers, scalers and scripts do so to count or to time steps.
    """

    _steps_begun: int = 0

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a function that takes the place of ``step`` is watched."""
        super().__setattr__(name, _watched(self, value) if name == "step" and not self._is_known(value) else value)

    def _is_known(self, value: Any) -> bool:
        """Whether this is put back: the step of the class, or one that is watched already."""
        function = getattr(value, "__func__", value)
        return function is type(self).step or getattr(function, _WATCHED, None) is function


def _watched(optimizer: ReplaceableStep, replaced_by: Callable[..., Any]) -> Callable[..., Any]:
    own = weakref.ref(optimizer)

    def step(_: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = own()
        assert optimizer is not None, "its step is called"
        before = optimizer._steps_begun
        result = replaced_by(*args, **kwargs)
        if optimizer._steps_begun == before:
            _refuse(optimizer, replaced_by)
        return result

    is_bound = isinstance(replaced_by, types.MethodType)  # schedulers look for the function of a bound method
    watched: Any = step if is_bound else lambda *args, **kwargs: step(None, *args, **kwargs)
    functools.update_wrapper(watched, replaced_by)  # with the marks of schedulers
    setattr(watched, _WATCHED, watched)  # a function that wraps it copies the mark, but is another
    return types.MethodType(watched, optimizer) if is_bound else watched


def _refuse(optimizer: Any, replaced_by: Callable[..., Any]) -> None:
    runtime = find_runtime()
    if runtime is None or not (isinstance(optimizer, HalfPrecision) or may_divide(runtime)):
        return
    if not any(optimizer.trains(model) for model in runtime[Models].alive):
        return
    name = type(optimizer).__name__
    what = f"the step of {name} was replaced by {_name(replaced_by)}, which has not called the step that it replaced"
    runtime[Updates].refuse(what)
    raise ConfigError(
        f"{what}: what it has updated is this rank's part only. Call that step in it, or put it into a subclass of the "
        "optimizer's class before smp.DistributedOptimizer wraps it; to skip a step, do not call optimizer.step()"
    )


def _name(function: Any) -> str:
    return f"{getattr(function, '__qualname__', type(function).__name__)} of {getattr(function, '__module__', None)}"
