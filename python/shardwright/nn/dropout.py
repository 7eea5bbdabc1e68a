"""Dropout in distributed modules: the same random numbers on all tp ranks, or others on each.

The ranks' own generators may be seeded alike or not, so the outermost module draws a number in each call, and all ranks
use tp rank 0's. From it come the numbers of every dropout in the call: for activations that are the same on all ranks
from the number itself, for those that are divided from the number and the tp rank. A layer that is computed again in
backward is given the same number again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

#: How many dropouts a layer may have.
STREAMS_PER_LAYER = 8


def draw_seed() -> int:
    """A number from this rank's default generator on the CPU."""
    return int(torch.randint(2**60, (), device="cpu").item())


def seed_of(seed: int, stream: int, rank: int | None) -> int:
    """That of one dropout.

    Args:
        seed: The call's.
        stream: The dropout's number in the call.
        rank: The tp rank for divided activations; None for replicated ones.
    """
    # Mixed, because the generator on the CPU knows only the last 32 bits.
    text = f"{seed} {stream} {rank}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@contextmanager
def random_numbers(seed: int, device: torch.device) -> Iterator[None]:
    """Let operations on a device draw from a seed; afterwards its default generator goes on where it was."""
    generator = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


def dropout(input: torch.Tensor, probability: float, seed: int) -> torch.Tensor:
    """Set elements to zero with a probability, and scale the others; the seed says which.

    Args:
        input: Floating, of any shape.
        probability: From 0 to 1.
        seed: Of :func:`seed_of`.

    Returns:
        Of the same shape and dtype.
    """
    with random_numbers(seed, input.device):
        return nn.functional.dropout(input, probability)
