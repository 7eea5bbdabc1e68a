"""The sharding of a parameter of a distributed module over tp ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwright.errors import ConfigError


@dataclass(frozen=True)
class Origin:
    """A weight of a replaced module that became a part of a weight of the distributed module in its place.

    Attributes:
        name: Its name in the module that was replaced.
        shape: Its shape there.
        rows: Which of our rows are which of its own, all elements of a row: our first row, its first row, and how many.
        transposed: Whether the last two dims are exchanged, and our rows are its columns.
        attributes: What the script had set on it.
    """

    name: str
    shape: tuple[int, ...]
    rows: tuple[tuple[int, int, int], ...]
    transposed: bool = False
    attributes: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def is_all(self) -> bool:
        """Whether our weight is this one, as it was."""
        return not self.transposed and self.rows == ((0, 0, self.shape[0]),)

    def of(self, ours: torch.Tensor) -> torch.Tensor:
        """Return the weight as it was, in new memory, given all of ours."""
        found = ours.new_empty(self.shape)
        laid_out = found.mT if self.transposed else found
        for first, theirs, rows in self.rows:
            laid_out[theirs : theirs + rows] = ours[first : first + rows]
        return found

    def put(self, theirs: torch.Tensor, ours: torch.Tensor) -> None:
        """Write the weight as it was into our weight."""
        laid_out = theirs.mT if self.transposed else theirs
        for first, of_theirs, rows in self.rows:
            ours[first : first + rows] = laid_out[of_theirs : of_theirs + rows]


@dataclass(frozen=True)
class Sharding:
    """The sharding of a parameter or buffer of a distributed module over tp ranks.

    Attributes:
        dim: The dim along which it is sliced, tp rank i having the i-th slice; None if it is whole on each rank that
            has it.
        blocks: The sizes, along ``dim``, of blocks that are sliced separately, such as query, key and value in one
            weight; empty for one block.
        owner: The only tp rank that has it, if it is not sliced; None if all ranks have it.
        scaled_batch: Whether it is applied to the samples of the whole group, so that its gradient is complete and is
            reduced over RDP_GROUP; otherwise it is applied to this rank's own samples, and is reduced over DP_GROUP
            like any other parameter.
        size: The size of the whole along ``dim``, which then need not be divisible by the degree: all parts have the
            size of the first, and the last ones end in zeros that are not part of the whole. None if the size is
            divisible.
    """

    dim: int | None = None
    blocks: tuple[int, ...] = ()
    owner: int | None = None
    scaled_batch: bool = True
    size: int | None = None

    @property
    def is_divided(self) -> bool:
        """Whether ranks have different parts of it: slices, or all of it on one rank."""
        return self.dim is not None or self.owner is not None

    @property
    def over_rdp(self) -> bool:
        """Whether only ranks of RDP_GROUP hold the same part of it, or get the same gradient."""
        return self.is_divided or self.scaled_batch

    def check(self, name: str, shape: Sequence[int], degree: int) -> None:
        """Check the shape of the whole parameter against the tensor parallelism degree."""
        if self.dim is None:
            return
        if self.size is not None:
            if shape[self.dim] != self.size:
                raise ConfigError(f"{name} has size {self.size} in dim {self.dim}, but shape {tuple(shape)} was given")
            return
        for size in self.blocks or (shape[self.dim],):
            if size % degree:
                raise ConfigError(
                    f"{name}: a size of {size} in dim {self.dim} of shape {tuple(shape)} does not divide by the tensor "
                    f"parallelism degree, {degree}"
                )

    def shard(self, whole: torch.Tensor, rank: int, degree: int) -> torch.Tensor | None:
        """Return a copy of a tp rank's part of the whole; None if the rank has no part."""
        if self.dim is None:
            return whole.detach().clone() if self.owner in (None, rank) else None
        if self.size is not None:
            rows = -(-self.size // degree)
            first = min(rank * rows, self.size)
            part = whole.detach().narrow(self.dim, first, min(rows, self.size - first))
            missing = list(part.shape)
            missing[self.dim] = rows - part.shape[self.dim]
            return torch.cat([part, part.new_zeros(missing)], self.dim)
        blocks = torch.split(whole.detach(), list(self.blocks) or whole.shape[self.dim], self.dim)
        return torch.cat([block.chunk(degree, self.dim)[rank] for block in blocks], self.dim)

    def whole(self, shards: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Return the whole, assembled from the parts of all tp ranks, in new memory."""
        if self.dim is None:
            return next(shard for shard in shards if shard is not None).detach().clone()
        parts = [shard.detach() for shard in shards if shard is not None]
        if self.size is not None:
            return torch.cat(parts, self.dim).narrow(self.dim, 0, self.size).clone()
        sizes = [size // len(parts) for size in self.blocks] or parts[0].shape[self.dim]
        split = [torch.split(part, sizes, self.dim) for part in parts]
        return torch.cat([piece for block in zip(*split, strict=True) for piece in block], self.dim)

    def slices(self, size: int, rank: int, degree: int) -> list[tuple[int, int, int]]:
        """Return a tp rank's slices of a dim: where each begins in the rank's part and in the whole, and its size.

        Args:
            size: The size of the whole along the dim.
            rank: The tp rank.
            degree: How many there are.
        """
        if self.size is not None:
            rows = -(-self.size // degree)
            first = min(rank * rows, self.size)
            return [(0, first, min(rows, self.size - first))]
        found, own, whole = [], 0, 0
        for block in self.blocks or (size,):
            part = block // degree
            found.append((own, whole + rank * part, part))
            own, whole = own + part, whole + block
        return found

    def global_shape(self, shape: Sequence[int], degree: int) -> tuple[int, ...]:
        """Return the shape of the whole, given that of a part."""
        whole = [size * (degree if dim == self.dim else 1) for dim, size in enumerate(shape)]
        if self.dim is not None and self.size is not None:
            whole[self.dim] = self.size
        return tuple(whole)


@dataclass(frozen=True)
class Rows(Sharding):
    """The sharding of a parameter over data-parallel ranks: rows, of which the last ranks have fewer, or none."""

    def shard(self, whole: torch.Tensor, rank: int, degree: int) -> torch.Tensor | None:
        """Return a copy of a rank's rows."""
        assert self.dim == 0, "rows are divided"
        rows = -(-whole.shape[0] // degree)
        return whole.detach()[rank * rows : (rank + 1) * rows].clone()
