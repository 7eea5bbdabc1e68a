"""What moves the bytes of a tensor-parallel group: ``torch.distributed``, or messages of the library within a host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from shardwright.tensor_parallel.pending import Pending


class BackEnd(Protocol):
    """Collectives of a group of several ranks, which all call in one order. They may end in any order, each once.

    Attributes:
        unfinished: What must not be destroyed, as other ranks may still wait for it.
    """

    unfinished: list[Any]

    def all_gather(
        self, own: torch.Tensor, lengths: Sequence[int], into: torch.Tensor | None = None
    ) -> Pending[list[torch.Tensor]]:
        """Send bytes to all ranks.

        Args:
            own: This rank's, uint8 of one dim; not to be changed before the end.
            lengths: How many bytes each rank sends.
            into: Where to put them, one after another, uint8 of one dim; by default wherever it costs least.

        Returns:
            The bytes of every rank, in the order of ranks, the own among them.
        """

    def all_to_all(self, own: torch.Tensor, sent: Sequence[int], lengths: Sequence[int]) -> Pending[list[torch.Tensor]]:
        """Send each rank bytes of its own.

        Args:
            own: For all ranks, one after another, uint8 of one dim; not to be changed before the end.
            sent: How many of them go to each rank.
            lengths: How many come from each rank.

        Returns:
            What came from every rank, in the order of ranks, the own among them.
        """

    def all_reduce(self, total: torch.Tensor) -> Pending[torch.Tensor]:
        """Sum a contiguous tensor over ranks, in place; of one shape and dtype on all of them.

        Returns:
            The tensor, with the same bits on all ranks.
        """

    def begin_step(self) -> None:
        """Begin a step; after :meth:`abandon_step` all ranks leave what the failed one has left."""

    def abandon_step(self) -> None:
        """The step has failed on all ranks of the group, each of which may be in another collective."""
