"""Advances a random number generator past what an operator would draw, without drawing it."""

from __future__ import annotations

import functools
from typing import Any

import torch

from shardwright import _core

#: Operators that fill a contiguous tensor on the CPU with one or two words of the generator for each element.
_FILLING = frozenset((torch.ops.aten.normal_, torch.ops.aten.uniform_))
#: Elements from which it is worth it: a jump takes as long as drawing some hundred thousand numbers.
_MANY = 1 << 18
#: Of the sizes at which it is tried how many words are drawn; the kernels work on 16 elements at once.
_TRIED = (1 << 10, 3 << 10)
_VECTOR = 16


def advanced(function: Any, meta: torch.Tensor, state: torch.Tensor) -> torch.Tensor | None:
    """Return the state of the CPU's generator after an operator has filled a tensor like `meta`.

    None if the operator has to run to find out: it is another one, the tensor is small or not contiguous, or this
    version of torch draws in another way than known here.
    """
    if function.overloadpacket not in _FILLING or meta.numel() < _MANY or not meta.is_contiguous():
        return None
    drawn = _words(function.overloadpacket, meta.dtype, meta.numel() % _VECTOR)
    return None if drawn is None else _advanced(state, drawn[0] * meta.numel() + drawn[1])


def _advanced(state: torch.Tensor, words: int) -> torch.Tensor:
    after = _core.advance_twister(state.numpy().tobytes(), words)
    return torch.frombuffer(bytearray(after), dtype=torch.uint8)


@functools.cache
def _words(packet: Any, dtype: torch.dtype, rest: int) -> tuple[int, int] | None:
    """Return the words that an operator draws per element, and besides, found by trial; None if it is not so simple."""
    ways = [(each, besides) for each in (1, 2) for besides in (0, each * _VECTOR)]
    for size in _TRIED:
        generator = torch.Generator().manual_seed(size)
        torch.empty(1, device="cpu").normal_(generator=generator)  # which keeps a second number for later
        before = generator.get_state()
        packet(torch.empty(size + rest, dtype=dtype, device="cpu"), generator=generator)
        after = generator.get_state()
        ways = [way for way in ways if torch.equal(_advanced(before, way[0] * (size + rest) + way[1]), after)]
    return ways[0] if ways else None
