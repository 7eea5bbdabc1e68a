"""Buckets of gradients that are reduced to one rank, where optimizer state is sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwright.data_parallel.bucket import GradBucket, dense_gradient
from shardwright.data_parallel.collectives import Collectives
from shardwright.data_parallel.shards import ParameterShards, Slice
from shardwright.half_precision import gradient_dtype


class ShardBucket(GradBucket):
    """Gradients, or parts of them, of which one rank updates the parameters.

    Attributes:
        owner: The global rank that gets the sums.
    """

    def __init__(self, index: int, owner: int, pieces: list[tuple[nn.Parameter, Slice]]) -> None:
        """Create an empty bucket for slices of parameters of one dtype on one device."""
        # Hooks, which are told which bucket is the last, are refused.
        super().__init__(index, [parameter for parameter, _ in pieces], is_last=False)
        self.owner = owner
        self._slices = [piece for _, piece in pieces]

    def fill(self) -> None:
        """Copy the gradients into the buffer; a parameter without a gradient contributes zeros."""
        pieces = zip(self.parameters(), self._slices, strict=True)
        self.set_buffer(torch.cat([piece.of(dense_gradient(parameter)) for parameter, piece in pieces]))

    def start(self, collectives: Collectives) -> Any:
        """Begin to sum the buffer on the owner, and return the work."""
        return collectives.reduce(self.buffer(), self.owner)

    def hand_out(self, used: set[nn.Parameter], as_views: bool) -> None:
        """Make the sums the parameters' gradients, on the owner.

        A gradient of which it owns a part has zeros elsewhere, so that what is computed of each element, and sums over
        ranks, are those of the whole gradient.
        """
        parts = torch.split(self.buffer(), [piece.stop - piece.start for piece in self._slices])
        for parameter, piece, part in zip(self.parameters(), self._slices, parts, strict=True):
            if parameter not in used:
                continue
            if part.numel() == parameter.numel():
                whole = part.view(parameter.shape)
                parameter.grad = whole if as_views else whole.clone()
            else:
                whole = part.new_zeros(parameter.shape)
                piece.of(whole).copy_(part)
                parameter.grad = whole


def make_shard_buckets(
    parameters: list[nn.Parameter],
    shards: ParameterShards,
    bucket_bytes: int,
    first_index: int,
) -> list[ShardBucket]:
    """Assign slices of parameters to buckets for each owner, in reverse order of the model.

    Args:
        parameters: Parameters with owners, in the model's order.
        shards: Their owners.
        bucket_bytes: How large the buckets that fill up meanwhile may get, all owners' together.
        first_index: The index of the first bucket in the fixed order of buckets.
    """
    owners = {piece.owner for parameter in parameters for piece in shards.of(parameter) or ()}
    limit = bucket_bytes // max(1, len(owners))
    lists: list[tuple[int, list[tuple[nn.Parameter, Slice]]]] = []
    open_lists: dict[tuple[int, torch.dtype, torch.device], list[tuple[nn.Parameter, Slice]]] = {}
    filled: dict[tuple[int, torch.dtype, torch.device], int] = {}
    for parameter in reversed(parameters):
        for piece in reversed(shards.of(parameter) or ()):
            kind = (piece.owner, gradient_dtype(parameter), parameter.device)
            size = (piece.stop - piece.start) * gradient_dtype(parameter).itemsize
            if kind not in open_lists or filled[kind] + size > limit:
                open_lists[kind] = []
                filled[kind] = 0
                lists.append((piece.owner, open_lists[kind]))
            open_lists[kind].append((parameter, piece))
            filled[kind] += size
    return [ShardBucket(index, owner, pieces) for index, (owner, pieces) in enumerate(lists, first_index)]
