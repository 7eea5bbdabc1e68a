"""The rows of a batch that microbatches get: of tensors, of lists, and those that belong together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

#: Collators, by name, that put a batch's chosen rows first and the rejected ones after them.
_PAIRING = {"DataCollatorForPreference", "DPODataCollatorWithPadding", "RewardDataCollatorWithPadding"}

#: Collators, by name, of trainers whose loss of a row depends on all rows, though not yet in the first batch.
_OF_ALL_ROWS = {"DataCollatorForUnpairedPreference", "DataCollatorForVisionUnpairedPreference"}


def is_flat(inputs: Mapping[str, Any], rows: int) -> bool:
    """Return whether a batch is of one row, beside tensors of other lengths, which say where its samples begin."""
    tensors = [one for one in inputs.values() if isinstance(one, torch.Tensor) and one.dim()]
    return rows == 1 and any(len(one) != 1 for one in tensors)


def is_of_all_rows(trainer: Any) -> bool:
    """Return whether the loss of a trainer is known to need all rows of a batch at once."""
    kinds = type(trainer.data_collator).__mro__
    # KTO subtracts the mean over the rows of a divergence, which is none before the first update.
    return any(kind.__name__ in _OF_ALL_ROWS for kind in kinds) and bool(getattr(trainer, "calculate_KL", True))


def blocks_of(collator: Any) -> int:
    """Return of how many blocks of rows the batches of a collator are, whose rows at the same place belong together."""
    return 2 if any(kind.__name__ in _PAIRING for kind in type(collator).__mro__) else 1


class Rows:
    """The values of a batch's rows, which a step function hands out by rows."""

    def __init__(self, values: Any, blocks: int = 1) -> None:
        """Of values with a length; of several blocks, one after another, each microbatch gets rows of every block."""
        self._values, self._blocks = values, blocks

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> Any:
        """Return the rows of a microbatch; of a number that does not divide evenly, the first ones get one more."""
        whole = len(self._values) // self._blocks
        begin = mb * (whole // num_mb) + min(mb, whole % num_mb)
        return self.chosen([begin], whole // num_mb + (mb < whole % num_mb))

    def chosen(self, begins: Sequence[int], count: int) -> Any:
        """Return so many rows of each block from each of these on."""
        whole = len(self._values) // self._blocks
        parts = [
            self._values[block * whole + begin : block * whole + begin + count]
            for block in range(self._blocks)
            for begin in begins
        ]
        if len(parts) == 1:
            return parts[0]
        if isinstance(self._values, torch.Tensor):
            return torch.cat(parts)
        return type(self._values)(one for part in parts for one in part)


def by_rows(inputs: Mapping[str, Any], rows: int, blocks: int = 1) -> dict[str, Any]:
    """Return a batch whose lists are divided as its tensors are, one entry for each row.

    Lists of another length that hold no tensors are given to each microbatch as they are.
    """

    def divided(value: Any) -> Any:
        return value if blocks == 1 and isinstance(value, torch.Tensor) else Rows(value, blocks)

    return {name: _mapped(value, rows, divided) for name, value in inputs.items()}


def chosen_rows(inputs: Mapping[str, Any], rows: int, blocks: int, begins: Sequence[int], count: int) -> dict[str, Any]:
    """Return so many rows of each block of a batch from each of these on."""

    def chosen(value: Any) -> Any:
        return Rows(value, blocks).chosen(begins, count)

    return {name: _mapped(value, rows, chosen) for name, value in inputs.items()}


def _mapped(value: Any, rows: int, function: Callable[[Any], Any]) -> Any:
    """Call a function on all in a value that has an entry for each row."""
    if isinstance(value, torch.Tensor):
        return function(value) if value.dim() and len(value) == rows else value
    if isinstance(value, Mapping):
        return {name: _mapped(one, rows, function) for name, one in value.items()}
    if not isinstance(value, (list, tuple)) or hasattr(value, "_fields"):
        return value
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    if tensors and all(leaf.dim() and len(leaf) == rows for leaf in tensors):
        return type(value)(_mapped(one, rows, function) for one in value)
    return function(value) if len(value) == rows else value
