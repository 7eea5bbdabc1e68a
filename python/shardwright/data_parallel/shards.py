"""Which rank owns which elements of a parameter, where optimizer state is sharded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary


class Slice(NamedTuple):
    """Elements of a flattened parameter, and the rank that has their optimizer state.

    Attributes:
        start: The first element.
        stop: The element after the last.
        owner: The global rank.
    """

    start: int
    stop: int
    owner: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """These elements of a tensor in the parameter's shape, as a 1-D tensor: a view if the tensor is contiguous."""
        return tensor.reshape(-1)[self.start : self.stop]


class ParameterShards:
    """The owners of the parameters of one rank's models.

    Attributes:
        version: Changes whenever owners do.
        digests: What was assigned over DP_GROUP and over RDP_GROUP, in order; the same on all ranks of the group.
    """

    def __init__(self) -> None:
        """Start with parameters that every rank updates."""
        self._slices: Any = WeakIdKeyDictionary()
        self._is_suspended = False
        self.version = 0
        self.digests = ("", "")

    def assign(
        self,
        parameters: Sequence[nn.Parameter],
        slices: Sequence[tuple[Slice, ...]],
        ranks: Sequence[int],
        *,
        over_rdp: bool,
    ) -> None:
        """Assign owners, also to parameters that have some.

        Args:
            parameters: The parameters, in the same order on all ranks that hold them.
            slices: The slices of each, in order.
            ranks: The global ranks that hold the parameters.
            over_rdp: Whether these are the ranks of RDP_GROUP, and not of DP_GROUP.
        """
        places = {rank: place for place, rank in enumerate(ranks)}
        said = [self.digests[over_rdp]]
        for parameter, own in zip(parameters, slices, strict=True):
            self._slices[parameter] = own
            shape = tuple(parameter.shape), str(parameter.dtype), parameter.requires_grad
            said.append(repr((shape, [(one.start, one.stop, places[one.owner]) for one in own])))
        digest = hashlib.sha256("\n".join(said).encode()).hexdigest()
        self.digests = (self.digests[0], digest) if over_rdp else (digest, self.digests[1])
        self.version += 1

    def assigned(self, parameter: torch.Tensor) -> tuple[Slice, ...] | None:
        """The slices of a parameter; None if every rank updates all of it."""
        found: tuple[Slice, ...] | None = self._slices.get(parameter)
        return found

    def of(self, parameter: torch.Tensor) -> tuple[Slice, ...] | None:
        """The slices of a parameter to whose owners its gradient is reduced; None if it is reduced to all ranks."""
        return None if self._is_suspended else self.assigned(parameter)

    def own(self, parameter: torch.Tensor, rank: int) -> Slice | None:
        """The slice of a sharded parameter that a rank owns; None if it has none."""
        return next((one for one in self.assigned(parameter) or () if one.owner == rank), None)

    def __bool__(self) -> bool:
        """Whether any parameter has owners."""
        return not self._is_suspended and len(self._slices) > 0

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Reduce all gradients to all ranks, inside the block, which all ranks have to enter."""
        self._is_suspended = True
        self.version += len(self._slices)
        try:
            yield
        finally:
            self._is_suspended = False
            self.version += len(self._slices)
