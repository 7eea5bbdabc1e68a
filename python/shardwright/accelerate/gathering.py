"""Tensors and objects of the ranks that have different samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import recursively_apply

from shardwright.errors import ConfigError
from shardwright.job.objects import allgather
from shardwright.job.ranks import data_group


def gathered_objects(value: Any) -> list[Any]:
    """Return the values of all ranks with different samples, in the order of their samples."""
    return allgather(value, data_group())


def gathered(values: Any) -> Any:
    """Return nested tensors, each concatenated over the ranks with different samples."""
    return recursively_apply(_gathered, values, error_on_other_type=True)


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    every = gathered_objects(tensor.detach().reshape(tensor.shape or (1,)).contiguous())
    return torch.cat([one.to(tensor.device) for one in every])


def reduced(values: Any, reduction: str, scale: float) -> Any:
    """Return nested tensors, each reduced over the ranks with different samples.

    Raises:
        ConfigError: The reduction is not known.
    """
    reductions: dict[str, Callable[..., torch.Tensor]] = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax}
    if reduction == "none":
        return values
    if reduction not in reductions:
        raise ConfigError(f"reduction is {reduction!r}; allowed: sum, mean, max, none")

    def over_ranks(tensor: torch.Tensor) -> torch.Tensor:
        every = torch.stack([one.to(tensor.device) for one in gathered_objects(tensor.detach())])
        return reductions[reduction](every, dim=0) * scale

    return recursively_apply(over_ranks, values, error_on_other_type=True)


def padded(values: Any, dim: int, pad_index: int, pad_first: bool) -> Any:
    """Return nested tensors, each as long in one dimension as the longest of the ranks with different samples."""
    return recursively_apply(_padded, values, error_on_other_type=True, dim=dim, index=pad_index, first=pad_first)


def _padded(tensor: torch.Tensor, *, dim: int, index: int, first: bool) -> torch.Tensor:
    if not -tensor.dim() <= dim < tensor.dim():
        return tensor
    missing = max(gathered_objects(tensor.shape[dim])) - tensor.shape[dim]
    if not missing:
        return tensor
    shape = [*tensor.shape]
    shape[dim] = missing
    padding = tensor.new_full(shape, index)
    return torch.cat([padding, tensor] if first else [tensor, padding], dim=dim)
