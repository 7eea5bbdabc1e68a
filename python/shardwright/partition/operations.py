"""Counts the floating-point operations of the PyTorch operations that dominate the cost of a forward.

``torch.utils.flop_counter`` counts them too, but imports Triton, which takes longer than importing this whole package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_Count = Callable[[tuple[Any, ...], Any], int]

_aten = torch.ops.aten


def count(func: Any, args: tuple[Any, ...], result: Any) -> int:
    """Return the number of multiplications and additions of an operation, as passed to ``__torch_dispatch__``.

    It is 0 for operations whose cost is negligible compared with matrix products.
    """
    counter = _COUNTS.get(getattr(func, "overloadpacket", None))
    return 0 if counter is None else counter(args, result)


def _product(args: tuple[Any, ...], _result: Any) -> int:
    """Count a product of shapes (..., m, k) and (..., k, n)."""
    left, right = args[:2]
    return int(2 * left.numel() * right.shape[-1])


def _added_product(args: tuple[Any, ...], result: Any) -> int:
    return _product(args[1:], result)


def _convolution(args: tuple[Any, ...], result: Any) -> int:
    """Count one filter for each number of the result or, if transposed, for each number of the input."""
    given, weight, transposed = args[0], args[1], args[6]
    return int(2 * (given if transposed else result).numel() * weight[0].numel())


def _attention(args: tuple[Any, ...], _result: Any) -> int:
    """Count queries (..., s_q, d), keys (..., s_k, d) and values (..., s_k, d_v), ignoring a causal mask."""
    query, key, value = args[:3]
    return int(2 * query[..., 0].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1]))


_COUNTS: dict[Any, _Count] = {
    getattr(_aten, name): counter
    for counter, names in {
        _product: ("mm", "bmm", "_scaled_mm"),
        _added_product: ("addmm", "baddbmm"),
        _convolution: ("convolution", "_convolution", "convolution_overrideable"),
        _attention: (
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
        ),
    }.items()
    for name in names
}
