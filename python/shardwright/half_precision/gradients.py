"""The dtype of gradients, which need not be that of their parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardwright.errors import ConfigError
from shardwright.half_precision.cast import HALF


def accumulate_in_float32(parameters: Iterable[torch.Tensor]) -> None:
    """Make the gradients of half-precision parameters float32, so that their sums are.

    Raises:
        ConfigError: This version of PyTorch does not have ``Tensor.grad_dtype``.
    """
    if not hasattr(torch.Tensor, "grad_dtype"):
        raise ConfigError(
            'the configuration key "_fp32_grad_accumulation" is true, which needs a PyTorch whose tensors have '
            f"grad_dtype (2.10 or newer); this is {torch.__version__}"
        )
    for parameter in parameters:
        if parameter.dtype in HALF and parameter.requires_grad:
            parameter.grad_dtype = torch.float32


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradient."""
    dtype: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return parameter.dtype if dtype is None else dtype
