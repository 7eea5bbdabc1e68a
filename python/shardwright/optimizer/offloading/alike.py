"""Chunks of one step, each of which finds what one step would find, and leaves what one would leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from shardwright.errors import ConfigError
from shardwright.groups import StandIns
from shardwright.optimizer.besides import Besides
from shardwright.optimizer.sharding.elementwise import is_elementwise, keeps_the_rule, original_class


def only(stand_ins: Mapping[int, torch.Tensor]) -> StandIns:
    """Return what stands for parameters in the groups while a chunk is updated: of those outside of it nothing.

    Args:
        stand_ins: What stands for those in it, by ``id``.
    """
    return lambda one: (stand_ins[id(one)],) if id(one) in stand_ins else ()


def alike_in_chunks(optimizer: Optimizer, update: Callable[[Optimizer], Any]) -> Callable[[Optimizer], None]:
    """Return an update for the chunks of one step.

    What it changes besides parameters and their state, such as a counter in the options of a group, is as before the
    step for each chunk, and has to be the same after each.

    Args:
        optimizer: The optimizer.
        update: The wrapped optimizer's step, without hooks.
    """
    kind = original_class(optimizer)
    if is_elementwise(kind) or keeps_the_rule(kind):
        return update  # these change nothing else
    before, left = Besides(optimizer), list[Besides]()

    def update_chunk(of: Optimizer) -> None:
        if left:
            before.restore()
        update(of)
        left.append(Besides(of))
        what = left[0].difference(left.pop() if len(left) > 1 else left[0])
        if what is not None:
            raise ConfigError(
                f'{kind.__name__} with "offload_optimizer", which updates parameters in parts: what its step leaves in '
                f"{what} depends on the parameters that it updates. Some have been updated and others not: continue "
                'from a checkpoint, with "offload_optimizer": False'
            )

    return update_chunk
