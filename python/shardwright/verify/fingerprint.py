"""A few numbers that stand for a tensor: enough to tell how far two tensors are apart, wherever each of them lies.

The norm of a difference is estimated from projections onto fixed vectors of random signs: the mean square of
``(a - b) . s`` over such ``s`` is the square of the norm of ``a - b``. So rank 0 need not hold the outputs of all
modules, and nobody need send them.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

#: Estimates are good to about a third with so many; a difference is never estimated as zero, short of a coincidence.
NUM_PROJECTIONS = 8
_COLUMNS = 4096
_ROWS = 256


class Fingerprint(NamedTuple):
    """What stays of a tensor.

    Attributes:
        shape: Its shape.
        dtype: Its dtype, such as ``"float32"``.
        root_mean_square: Of its finite elements.
        projections: Onto the sign vectors.
        not_finite: How many elements are NaN, infinite and minus infinite.
    """

    shape: tuple[int, ...]
    dtype: str
    root_mean_square: float
    projections: tuple[float, ...]
    not_finite: tuple[int, int, int]

    def describe(self) -> str:
        """Shape and dtype in words."""
        return f"{self.shape} {self.dtype}"


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    """Return the fingerprint of a tensor of any dtype; for a sparse one, of its dense form."""
    values = tensor.detach()
    if values.layout is not torch.strided:
        values = values.to_dense()
    flat = (torch.view_as_real(values.resolve_conj()) if values.is_complex() else values.resolve_neg()).reshape(-1)
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    square = 0.0
    projected = [0.0] * NUM_PROJECTIONS
    not_finite = [0, 0, 0]
    for start in range(0, flat.numel(), _ROWS * _COLUMNS):
        part = flat[start : start + _ROWS * _COLUMNS].to(torch.float64)
        if not bool(torch.isfinite(part).all()):
            for index, found in enumerate((part.isnan(), part == math.inf, part == -math.inf)):
                not_finite[index] += int(found.sum())
            part = torch.where(torch.isfinite(part), part, 0.0)
        square += float(part.square().sum())
        for index, number in enumerate(_project(part, start)):
            projected[index] += number
    count = max(flat.numel(), 1)
    return Fingerprint(shape, dtype, math.sqrt(square / count), tuple(projected), tuple(not_finite))  # type: ignore[arg-type]


def distance(found: Fingerprint, expected: Fingerprint, floor: float = 0.0) -> float:
    """The root mean square of the difference, relative to that of ``expected``, or to ``floor`` where that is more.

    Infinite for tensors of another shape, another dtype, or with other elements that are not finite.
    """
    if (found.shape, found.dtype, found.not_finite) != (expected.shape, expected.dtype, expected.not_finite):
        return math.inf
    squares = [(a - b) ** 2 for a, b in zip(found.projections, expected.projections, strict=True)]
    difference = math.sqrt(sum(squares) / NUM_PROJECTIONS / max(math.prod(expected.shape), 1))
    scale = max(expected.root_mean_square, floor)
    if difference == 0:
        return 0.0
    return difference / scale if scale else math.inf


@functools.cache
def _signs(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Signs by column and by row; the sign of an element is the product of both, so that few numbers make many."""
    generator = torch.Generator().manual_seed(0)
    columns = torch.randint(2, (_COLUMNS, NUM_PROJECTIONS), generator=generator)
    rows = torch.randint(2, (_ROWS, NUM_PROJECTIONS), generator=generator)
    with torch.inference_mode(False):
        return (columns * 2 - 1).to(device, torch.float64), (rows * 2 - 1).to(device, torch.float64)


def _project(part: torch.Tensor, start: int) -> list[float]:
    columns, rows = _signs(part.device)
    whole, rest = divmod(part.numel(), _COLUMNS)
    sums = torch.zeros(NUM_PROJECTIONS, dtype=torch.float64, device=part.device)
    if whole:
        sums += (part[: whole * _COLUMNS].view(whole, _COLUMNS) @ columns * rows[:whole]).sum(dim=0)
    if rest:
        sums += part[whole * _COLUMNS :] @ columns[:rest] * rows[whole % _ROWS]
    # Each stretch of rows has signs of its own: a turn of the projections.
    return sums.roll(start // (_ROWS * _COLUMNS)).tolist()
