"""Gradients as they cross ranks: which result or argument each is of, and their tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwright import _core
from shardwright.values import pack, unpack


def pack_gradients(gradients: Sequence[tuple[int, torch.Tensor]]) -> tuple[list[tuple[int, int]], _core.TensorParts]:
    """Copy gradients into a body; one that stands for several is sent once.

    Returns:
        For each the number of what it is of and that of its tensor, and the tensors.

    Raises:
        UnsupportedValueError: One is of a kind that cannot cross ranks.
    """
    numbers: dict[int, int] = {}
    tensors: list[torch.Tensor] = []
    pairs = []
    for of, gradient in gradients:
        number = numbers.setdefault(id(gradient), len(tensors))
        if number == len(tensors):
            tensors.append(gradient)
        pairs.append((of, number))
    return pairs, pack(tensors, [False] * len(tensors))


def unpack_gradients(pairs: list[tuple[int, int]], parts: _core.TensorParts) -> list[tuple[int, torch.Tensor]]:
    """The gradients of a body, each with the number of what it is of."""
    tensors = unpack(parts)
    return [(of, tensors[number]) for of, number in pairs]
