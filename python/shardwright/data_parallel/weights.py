"""The weights of microbatches in a step: equal, or as passed to ``model.backward``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from shardwright.errors import ShardwrightError

#: Between these, and at 0, weights of any number of microbatches and ranks have a sum that float32 holds.
_MIN, _MAX = 1e-30, 1e30


class LabelCounts(NamedTuple):
    """An argument of the step function with labels, and their numbers, which differ between microbatches."""

    name: str
    counts: list[int]


class StepWeights:
    """The weights of the microbatches of a step, in one pipeline.

    Attributes:
        labels: Labels of which microbatches have different numbers, which a mean over microbatches does not see.
        counts: How many samples each microbatch has, where an evaluation's batch does not divide evenly.
    """

    def __init__(self, rank: int, num_microbatches: int) -> None:
        """Create it without weights."""
        self._rank = rank
        self._num_microbatches = num_microbatches
        self._given: dict[int, float | None] = {}
        self._is_weighted = False
        self.counts: list[int] | None = None
        self.labels: LabelCounts | None = None

    @property
    def is_plain(self) -> bool:
        """Whether backwards have begun on this rank, all without a weight."""
        return bool(self._given) and self.given is None

    def give(
        self, microbatch: int, weight: float | torch.Tensor | None, tensors: torch.Tensor | Sequence[torch.Tensor]
    ) -> float | None:
        """Set the weight of a backward that begins from these tensors, and return it as a number.

        Raises:
            ValueError: It is not one number of those that are allowed, or that a tensor's dtype holds.
            ShardwrightError: Another backward of the step says otherwise.
        """
        if weight is None and not self._is_weighted:  # what nearly all backwards do
            self._given[microbatch] = None
            return None
        number = None
        if weight is not None:
            where = f"in microbatch {microbatch} on rank {self._rank}"
            number = _checked(weight, where)
            _check_dtypes(number, [tensors] if isinstance(tensors, torch.Tensor) else tensors, where)
        if self._given.setdefault(microbatch, number) != number:
            raise ShardwrightError(
                f"model.backward: microbatch {microbatch} was given weight={self._given[microbatch]} before and "
                f"weight={number} now; a microbatch has one weight in a step, for all its losses"
            )
        self._is_weighted = True
        for other, theirs in self._given.items():
            if (theirs is None) != (number is None):
                raise ShardwrightError(
                    f"model.backward: microbatch {microbatch} was given weight={number}, microbatch {other} "
                    f"weight={theirs}; give a weight in every microbatch of a step or in none"
                )
        return number

    @property
    def given(self) -> list[float] | None:
        """The weight of each microbatch, 0.0 without a backward; None if no weights were given."""
        if not self._is_weighted:
            return None
        return [self._given.get(microbatch) or 0.0 for microbatch in range(self._num_microbatches)]

    def take_over(self, given: Sequence[float] | None, counts: list[int] | None) -> None:
        """Set the weights that the root has sent."""
        self._given = {} if given is None else dict(enumerate(given))
        self._is_weighted = given is not None
        self.counts = counts

    def of_outputs(self) -> Sequence[float] | None:
        """The weights of outputs in a mean over microbatches; None if they are equal."""
        return self.given or self.counts

    @property
    def total(self) -> float | None:
        """The sum of the weights; None if no weights were given."""
        given = self.given
        return None if given is None else math.fsum(given)


def _checked(weight: float | torch.Tensor, where: str) -> float:
    allowed = f"{where}; it has to be 0 or a number from {_MIN:g} to {_MAX:g}"
    if isinstance(weight, torch.Tensor) and (weight.numel() != 1 or weight.is_complex()):
        raise ValueError(
            f"model.backward: weight has shape {tuple(weight.shape)} and dtype {weight.dtype} {where}; it has to be "
            "one real number"
        )
    try:
        number = float(weight)
    except (TypeError, ValueError):
        raise ValueError(
            f"model.backward: weight is a {type(weight).__name__} {where}; it has to be a number, such as a number of "
            "labels"
        ) from None
    except OverflowError:
        raise ValueError(f"model.backward: weight is larger than any float {allowed}") from None
    if not (number == 0 or _MIN <= number <= _MAX):
        raise ValueError(f"model.backward: weight is {number:g} {allowed}")
    return number


def _check_dtypes(number: float, tensors: Sequence[torch.Tensor], where: str) -> None:
    """Raise if the dtype of a tensor cannot represent the weight, with which its gradient begins."""
    for tensor in tensors:
        if number and isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.is_complex()):
            info = torch.finfo(tensor.dtype)
            if not info.tiny <= number <= info.max:
                raise ValueError(
                    f"model.backward: weight is {number:g} {where}, and its tensor of dtype {tensor.dtype}, which has "
                    f"numbers from {info.tiny:g} to {info.max:g}: give it as float(), or scale all weights"
                )
