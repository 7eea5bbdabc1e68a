"""Gradients as sent between ranks: the numbers of the results or arguments that they belong to, and their tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwright import _core
from shardwright.values import pack, unpack


def pack_gradients(gradients: Sequence[tuple[int, torch.Tensor]]) -> tuple[list[tuple[int, int]], _core.TensorParts]:
    """Copy gradients into a message body; a tensor that is the gradient of several values is sent once.

    Returns:
        For each gradient the number of its value and the number of its tensor; and the tensors.

    Raises:
        UnsupportedValueError: A gradient is a tensor of a kind that cannot cross ranks.
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
    """Return the gradients of a message body, each with the number of its value."""
    tensors = unpack(parts)
    return [(of, tensors[number]) for of, number in pairs]
