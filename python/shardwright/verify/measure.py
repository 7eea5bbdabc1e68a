"""Measures errors: how far the results of the ranks are from those of one process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

#: A gradient's error is relative to its own largest element, or to this fraction of the largest of all gradients. The
#: true gradient of an attention's key bias, for example, is zero, and noise relative to noise is meaningless.
FLOOR = 1e-3

#: The tolerance by the coarsest dtype that the step computes with. Both sides run the same kernels on the same shapes,
#: so only the order of additions differs: over microbatches, over replicas, and over several uses of a tensor. The
#: difference is a few units in the last place of the sums' dtype.
TOLERANCES: Mapping[str, float] = {
    "float64": 1e-10,
    "complex128": 1e-10,
    "float32": 1e-5,
    "complex64": 1e-5,
    "float16": 4e-3,
    "bfloat16": 3e-2,
}


def tolerance_for(dtypes: Iterable[str]) -> tuple[str, float]:
    """Return the coarsest of the dtypes that a step computed with, and the tolerance for it."""
    found = [dtype for dtype in dtypes if dtype in TOLERANCES]
    coarsest = max(found, key=TOLERANCES.__getitem__, default="float64")
    return coarsest, TOLERANCES[coarsest]


def floor_of(gradients: Iterable[torch.Tensor | None]) -> float:
    """Return the least value that errors of gradients are relative to. See :data:`FLOOR`."""
    return FLOOR * max((size_of(gradient) for gradient in gradients if gradient is not None), default=0.0)


def size_of(tensor: torch.Tensor) -> float:
    """Return the largest magnitude of the finite elements; 0 if there are none."""
    if not tensor.numel():
        return 0.0
    values = _comparable(tensor).abs()
    finite = values[torch.isfinite(values)]
    return float(finite.max()) if finite.numel() else 0.0


def error_of(found: torch.Tensor | None, expected: torch.Tensor | None, floor: float = 0.0) -> tuple[float, str]:
    """Return the largest difference of two tensors, relative to the largest element of ``expected`` or to ``floor``.

    None stands for a missing gradient. The error is infinite if the two cannot be compared, and the text tells why.
    """
    if found is None or expected is None:
        if found is expected:
            return 0.0, ""
        return math.inf, "none on the ranks" if found is None else "none in one process"
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return math.inf, f"{_kind(found)} on the ranks, {_kind(expected)} in one process"
    if not found.numel():
        return 0.0, ""
    here, there = _comparable(found).to("cpu"), _comparable(expected).to("cpu")
    same = (here == there) | (here.isnan() & there.isnan())  # equal infinities have no difference
    if bool(same.all()):
        return 0.0, ""
    difference = float((here - there).masked_fill(same, 0.0).abs().max())
    if not math.isfinite(difference):
        return math.inf, "not finite on one side only"
    scale = max(size_of(there), floor)
    return (difference / scale if scale else math.inf), ""


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.detach()
    if values.layout is not torch.strided:
        values = values.to_dense()
    return values.to(torch.complex128 if values.is_complex() else torch.float64)


def _kind(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors and plain values in a structure, each with its path."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from leaves(getattr(value, field.name), f"{path}.{field.name}")
    else:
        yield path, value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a structure, in order."""
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def plain(value: Any) -> Any:
    """Return a leaf in a form that can be sent and compared: a tensor, a plain value, or the name of its type."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return f"a {type(value).__qualname__}"


def error_of_leaf(found: Any, expected: Any) -> tuple[float, str]:
    """Return the error of one leaf of what a step function returned."""
    if isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor):
        return error_of(found, expected)
    if type(found) is float and type(expected) is float:
        return error_of(torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64))
    if type(found) is type(expected) and found == expected:
        return 0.0, ""
    return math.inf, f"{_short(found)} on the ranks, {_short(expected)} in one process"


def _short(value: Any) -> str:
    return _kind(value) if isinstance(value, torch.Tensor) else repr(value)[:60]
