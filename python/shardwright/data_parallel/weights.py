"""How much each microbatch of a step counts: all alike, or by the weights given to ``model.backward``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from shardwright.errors import ShardwrightError

#: Between these, and at 0, weights of any number of microbatches and ranks have a sum that float32 holds.
_MIN, _MAX = 1e-30, 1e30


class LabelCounts(NamedTuple):
    """Labels of which microbatches have different numbers.

    Attributes:
        name: The argument, as written in the step function.
        counts: How many labels each microbatch has.
    """

    name: str
    counts: list[int]


class StepWeights:
    """The weights of one step's microbatches, in one pipeline.

    Attributes:
        labels: Labels of which microbatches have different numbers, which a mean over microbatches does not see.
        counts: How many samples each microbatch has, where an evaluation's batch does not divide evenly.
    """

    def __init__(self, rank: int, num_microbatches: int) -> None:
        """Nothing is given yet on this rank."""
        self._rank = rank
        self._num_microbatches = num_microbatches
        self._given: dict[int, float | None] = {}
        self._is_weighted = False
        self.counts: list[int] | None = None
        self.labels: LabelCounts | None = None

    @property
    def is_plain(self) -> bool:
        """Whether backwards have begun on this rank, all of them without a weight."""
        return bool(self._given) and self.given is None

    def give(
        self, microbatch: int, weight: float | torch.Tensor | None, tensors: torch.Tensor | Sequence[torch.Tensor]
    ) -> float | None:
        """Note the weight with which a backward begins from these tensors; returns it as a number.

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
        """Each microbatch's weight, 0.0 where no backward began; None where none were given."""
        if not self._is_weighted:
            return None
        return [self._given.get(microbatch) or 0.0 for microbatch in range(self._num_microbatches)]

    def take_over(self, given: Sequence[float] | None, counts: list[int] | None) -> None:
        """Know what the rank knows that runs the step function."""
        self._given = {} if given is None else dict(enumerate(given))
        self._is_weighted = given is not None
        self.counts = counts

    def of_outputs(self) -> Sequence[float] | None:
        """What outputs count in a mean over microbatches; None for all alike."""
        return self.given or self.counts

    @property
    def total(self) -> float | None:
        """The sum of the weights; None where none were given."""
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
    """Refuse a weight that is infinite, or nothing, in the dtype of a tensor: its gradient begins with it."""
    for tensor in tensors:
        if number and isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.is_complex()):
            info = torch.finfo(tensor.dtype)
            if not info.tiny <= number <= info.max:
                raise ValueError(
                    f"model.backward: weight is {number:g} {where}, and its tensor of dtype {tensor.dtype}, which has "
                    f"numbers from {info.tiny:g} to {info.max:g}: give it as float(), or scale all weights"
                )
