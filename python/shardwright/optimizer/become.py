"""Optimizers that become instances of another class."""

from __future__ import annotations

import functools
import weakref
from typing import Any, TypeVar

from torch.optim import Optimizer

from shardwright.optimizer.replaced_step import counts_steps_only

Kind = TypeVar("Kind", bound=Optimizer)


def become(optimizer: Optimizer, kind: type[Kind]) -> Kind:
    """Make an optimizer an instance of a class, in place.

    A learning-rate scheduler that was created before has put a method into the optimizer that counts steps, and calls
    that of the class before: one that calls this class's takes its place.
    """
    is_counting = counts_steps_only(optimizer)
    optimizer.__class__ = kind
    assert isinstance(optimizer, kind), "it was just made one"
    bound: Any = vars(optimizer).get("step")
    if is_counting:
        own = weakref.ref(optimizer)

        @functools.wraps(bound)  # the mark too
        def step(*args: Any, **kwargs: Any) -> Any:
            optimizer: Any = own()
            optimizer._opt_called = True
            return kind.step(optimizer, *args, **kwargs)

        vars(optimizer)["step"] = step
    return optimizer
