"""What a case trains: a whole model, the same with divided modules, and its batches."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Batch = dict[str, torch.Tensor]
LENGTH = 5


@dataclass(frozen=True)
class Problem:
    """A model and how it is trained.

    Attributes:
        whole: Makes the whole model; it may be marked for tensor parallelism.
        batch: Makes a batch of so many samples.
        loss: Of a model, whole or distributed, and a batch.
        divide: Makes the model to give to ``smp.DistributedModel`` of the whole one, which stays as it is.
        replaced: The classes that ``smp.DistributedModel`` has to replace, and how many modules of each; those of
            which other modules are replaced one by one are not in it.
        pins: The modules that the second pipeline rank gets; empty divides automatically.
    """

    whole: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], Batch]
    loss: Callable[[Any, Batch], torch.Tensor]
    divide: Callable[[nn.Module], nn.Module] = copy.deepcopy
    replaced: Mapping[str, int] = field(default_factory=dict)
    pins: tuple[str, ...] = ()


def generator(name: str, step: int, index: int) -> torch.Generator:
    """The source of a batch, the same on every rank."""
    return torch.Generator().manual_seed(zlib.crc32(f"{name} {step} {index}".encode()))


def normal(random: torch.Generator, *shape: int) -> torch.Tensor:
    """Normally distributed numbers, in double precision."""
    return torch.randn(shape, generator=random, dtype=torch.float64)
