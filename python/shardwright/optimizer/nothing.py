"""Steps of a rank that has no parameter of an optimizer, such as one without any in its stage or share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from shardwright.job.runtime import find_runtime
from shardwright.optimizer.besides import Besides

#: Optimizers of which it was said that they are not stepped here.
_TOLD: Any = WeakIdKeyDictionary()


def update_nothing(optimizer: Optimizer, update: Callable[[], Any], closure: Callable[[], Any] | None) -> Any:
    """Step an optimizer whose groups are empty, so that its options and hooks are where they are on other ranks.

    An optimizer that cannot step without parameters is left as it is.

    Args:
        optimizer: The optimizer.
        update: Its step, without a closure.
        closure: Is called once.

    Returns:
        The result of the closure.
    """
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    before = Besides(optimizer)
    try:
        update()
    except Exception as error:
        before.restore()
        if optimizer not in _TOLD and (runtime := find_runtime()) is not None:
            _TOLD[optimizer] = True
            runtime.logger.info(
                "rank %d has no parameters of %s, which cannot step without any (%s: %s): it is left as it is here",
                runtime.place.rank,
                type(optimizer).__name__,
                type(error).__name__,
                error,
            )
    return loss
