"""How a parameter of a distributed module lies over tp ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwright.errors import ConfigError


@dataclass(frozen=True)
class Sharding:
    """How a parameter or buffer of a distributed module lies over tp ranks.

    Attributes:
        dim: Along which it is sliced, tp rank i having the i-th slice; None if it is whole on each rank that has it.
        blocks: The sizes, along ``dim``, of blocks that are sliced each for itself, such as query, key and value in one
            weight; empty for one block.
        owner: The only tp rank that has it, for one that is not sliced; None if all do.
        scaled_batch: Whether it meets the samples of the whole group, so that its gradient is complete and is reduced
            over RDP_GROUP; otherwise it meets this rank's own, and is reduced over DP_GROUP as any other.
        size: The whole's size along ``dim``, which then need not divide by the degree: parts are as large as the first,
            and the last ones end in zeros that are not part of the whole. None for a size that divides.
    """

    dim: int | None = None
    blocks: tuple[int, ...] = ()
    owner: int | None = None
    scaled_batch: bool = True
    size: int | None = None

    @property
    def is_divided(self) -> bool:
        """Whether ranks have different parts of it: slices, or one rank all."""
        return self.dim is not None or self.owner is not None

    @property
    def over_rdp(self) -> bool:
        """Whether only ranks of RDP_GROUP hold the same of it, or get the same gradient."""
        return self.is_divided or self.scaled_batch

    def check(self, name: str, shape: Sequence[int], degree: int) -> None:
        """Hold the whole parameter's shape against the tensor parallelism degree.

        Raises:
            ConfigError: A block does not divide by it, or a size that need not is another one.
        """
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
        """A tp rank's part of the whole, in memory of its own.

        Args:
            whole: As it would be on one rank.
            rank: The tp rank.
            degree: The tensor parallelism degree.

        Returns:
            The part; None if this rank has nothing of it.
        """
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
        """The whole from the parts of all tp ranks, in memory of its own."""
        if self.dim is None:
            return next(shard for shard in shards if shard is not None).detach().clone()
        parts = [shard.detach() for shard in shards if shard is not None]
        if self.size is not None:
            return torch.cat(parts, self.dim).narrow(self.dim, 0, self.size).clone()
        sizes = [size // len(parts) for size in self.blocks] or parts[0].shape[self.dim]
        split = [torch.split(part, sizes, self.dim) for part in parts]
        return torch.cat([piece for block in zip(*split, strict=True) for piece in block], self.dim)

    def global_shape(self, shape: Sequence[int], degree: int) -> tuple[int, ...]:
        """The whole's shape, from that of a part."""
        whole = [size * (degree if dim == self.dim else 1) for dim, size in enumerate(shape)]
        if self.dim is not None and self.size is not None:
            whole[self.dim] = self.size
        return tuple(whole)
