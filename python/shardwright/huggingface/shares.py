"""Which part of the global batch each microbatch is, so that the losses of microbatches make that of the batch.

A microbatch with a share *s* of the batch's labels is told that there are *N s* of them, and its loss is multiplied by
*s*. So a sum *A* that is divided by the number becomes *A / N*, a mean over labels counts for the labels that it is the
mean over, and what is added to either, such as the loss of a router, counts once: whatever a model or a script does
with the number, nobody has to ask. Only of a sum that is not divided one has to (`weighing.py`): it counts as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Share:
    """The share of a microbatch.

    Attributes:
        weight: What its loss is multiplied by; 0 if it has nothing that the loss is of.
        number: What it is told as ``num_items_in_batch``.
        part: Which part it is of what its replica has of the batch, times the number of replicas.
    """

    weight: float
    number: Any
    part: float

    def told(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return its inputs, in which a number of labels that the batch has with it is its part of that."""
        number = inputs.get("num_items_in_batch")
        if number is None or not self.part:
            return inputs
        return {**inputs, "num_items_in_batch": times(number, self.part, torch.float64)}


class Shares(list[Share]):
    """One share for each microbatch, which a step function hands out."""

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> Share:
        """Return that of a microbatch."""
        return self[mb]


def counts_of(labels: torch.Tensor | None, rows: int, parts: int, blocks: int = 1) -> list[int]:
    """Return how many labels each part of a batch has, parts of equal size; without labels, how many rows."""
    if labels is None:
        return [rows // parts] * parts
    counts: list[int] = labels.ne(-100).reshape(blocks, parts, -1).sum(dim=(0, 2)).tolist()
    return counts


def shares_of(
    counts: Sequence[int],
    number: Any,
    *,
    dtype: torch.dtype,
    every_replica: Sequence[int],
    accumulated: int,
    is_sum: bool = False,
) -> Shares:
    """Return the shares of the microbatches of a replica.

    Args:
        counts: How many labels each has.
        number: How many labels the global batch has, of all replicas and all batches that are accumulated; None if the
            loss is not told.
        dtype: Of numbers that are not whole ones.
        every_replica: How many labels each replica has in this batch.
        accumulated: By how many batches a loss is divided.
        is_sum: Whether losses add up as they are, so that each microbatch counts once and is told the whole number.
    """
    if number and not sum(every_replica):  # a sum of nothing, and what is added to it
        counts, every_replica = [1] * len(counts), [len(counts)] * len(every_replica)
    # Gradients are averaged over replicas, so that the weights of all together have to be as many as there are.
    scale = len(every_replica) / (1 if is_sum else max(1, sum(every_replica)))
    told = [number if number is None or not count else times(number, count * scale, dtype) for count in counts]
    return Shares(
        [Share(count * scale / accumulated, one, count * scale) for count, one in zip(counts, told, strict=True)]
    )


def times(number: Any, factor: float, dtype: torch.dtype) -> Any:
    """Return a number of labels times a factor, as a tensor if it is one, and whole if it is whole."""
    value = float(number) * factor
    whole = round(value)
    if abs(value - whole) <= 1e-9 * value:
        return number.new_tensor(whole) if isinstance(number, torch.Tensor) else whole
    return torch.tensor(value, dtype=dtype, device=number.device) if isinstance(number, torch.Tensor) else value
