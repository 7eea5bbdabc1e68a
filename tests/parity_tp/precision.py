"""Double precision throughout, so that a comparison at 1e-10 says something."""

from __future__ import annotations

import functools
from typing import Any

import torch


def compute_in_double() -> None:
    """Make casts to single precision casts to double, on every thread of this process from now on.

    Models of ``transformers`` compute norms, rotary tables, softmax and losses in single precision, whatever the dtype
    of their parameters. Functions are replaced for good, since modules run on several threads and a
    ``TorchFunctionMode`` is of one.
    """
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign, assignment]
    for owner, names in (
        (torch.Tensor, ("to", "softmax", "log_softmax", "sum", "mean")),
        (torch, ("softmax", "arange")),
    ):
        for name in names:
            setattr(owner, name, _widened(getattr(owner, name)))


def _widened(function: Any) -> Any:
    @functools.wraps(function)
    def widened(*args: Any, **kwargs: Any) -> Any:
        wide = tuple(torch.float64 if one is torch.float32 else one for one in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return function(*wide, **kwargs)

    return widened
