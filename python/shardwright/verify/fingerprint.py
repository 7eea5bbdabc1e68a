"""Fingerprints of tensors: a few numbers that suffice to estimate the distance of two tensors on different ranks.

The norm of a difference is estimated from projections onto fixed vectors ``s`` of random signs: the mean square of
``(a - b) . s`` over such vectors is the square of the norm of ``a - b``. Rank 0 therefore need not hold the outputs of
all modules, and the ranks need not send them.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

#: With this many, estimates are accurate to about a third. A difference is estimated as zero only by coincidence.
NUM_PROJECTIONS = 8
_COLUMNS = 4096
_ROWS = 256


class Fingerprint(NamedTuple):
    """The fingerprint of a tensor.

    Attributes:
        root_mean_square: The root mean square of its finite elements.
        projections: The projections onto the sign vectors.
        not_finite: The numbers of elements that are NaN, infinity and minus infinity.
    """

    shape: tuple[int, ...]
    dtype: str
    root_mean_square: float
    projections: tuple[float, ...]
    not_finite: tuple[int, int, int]

    def describe(self) -> str:
        """Return the shape and the dtype as text."""
        return f"{self.shape} {self.dtype}"


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    """Return the fingerprint of a tensor of any dtype. A sparse tensor has that of its dense form."""
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
    """Return the root mean square of the difference, relative to that of ``expected``, or to ``floor`` if larger.

    The result is infinite for tensors of different shapes or dtypes, or with different numbers of non-finite elements.
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
    """Return signs by column and by row. The sign of an element is their product, so that few signs suffice."""
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
    # Each block of rows has its own signs, by a rotation of the projections.
    return sums.roll(start // (_ROWS * _COLUMNS)).tolist()
