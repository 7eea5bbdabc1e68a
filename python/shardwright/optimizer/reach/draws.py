"""Random numbers that an optimizer draws in its step: ranks that update parts would not draw those of one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.optim import Optimizer

from shardwright.errors import ConfigError
from shardwright.execution import process


@contextlib.contextmanager
def drawing_nothing(optimizer: Optimizer) -> Iterator[None]:
    """Run an update that is not to draw numbers of PyTorch's own streams.

    Args:
        optimizer: The optimizer, for the error.

    Raises:
        ConfigError: It did.
    """
    before = process.random_state()
    yield
    after = process.random_state()
    devices = before[1].keys() & after[1].keys()
    is_same = torch.equal(before[0].get_state(), after[0].get_state()) and all(
        torch.equal(before[1][device], after[1][device]) for device in devices
    )
    if not is_same:
        raise ConfigError(
            f"{type(optimizer).__name__} drew random numbers in its step, while ranks update parts of the model, which "
            "would not draw those of one process: have it draw from a torch.Generator of its own, seeded alike on all "
            "ranks, or divide neither parameters nor the optimizer's state"
        )
