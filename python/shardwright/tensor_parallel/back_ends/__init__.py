"""What moves the bytes of a tensor-parallel group: ``torch.distributed``, or messages of the library within a host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from shardwright.tensor_parallel.packing import Pending


class BackEnd(Protocol):
    """Collectives of a group of several ranks, which all call in one order. They may end in any order, each once.

    ``unfinished`` must not be destroyed, as other ranks may still wait for it.
    """

    unfinished: list[Any]

    def all_gather(
        self, own: torch.Tensor, lengths: Sequence[int], into: torch.Tensor | None = None
    ) -> Pending[list[torch.Tensor]]:
        """Send bytes, uint8 of one dim, to all ranks; they must not change before the end.

        Each rank sends as many as ``lengths`` tells. Returns the bytes of every rank, in the order of ranks, the own
        among them: one after another in ``into``, or wherever it costs least.
        """

    def all_to_all(self, own: torch.Tensor, sent: Sequence[int], lengths: Sequence[int]) -> Pending[list[torch.Tensor]]:
        """Send each rank bytes of its own: uint8 of one dim, one after another, not to be changed before the end.

        ``sent`` of them go to each rank, and ``lengths`` come from each. Returns what came from every rank, the own
        among them.
        """

    def all_reduce(self, total: torch.Tensor) -> Pending[torch.Tensor]:
        """Sum a contiguous tensor over ranks, in place, with the same bits on all of them."""

    def begin_step(self) -> None:
        """Begin a step; after :meth:`abandon_step` all ranks leave what the failed one has left."""

    def abandon_step(self) -> None:
        """The step has failed on all ranks of the group, each of which may be in another collective."""
