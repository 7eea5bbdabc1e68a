"""Dropout in distributed modules: the same random numbers on all tp ranks, or different ones on each.

The generators of the ranks may have the same or different seeds. Therefore the outermost module draws a seed in each
call, and all ranks use the seed of tp rank 0. The random numbers of every dropout in the call are derived from it: for
activations that are the same on all ranks, from the seed alone; for divided ones, from the seed and the tp rank. A
layer that is recomputed in the backward gets the same seed again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

#: The maximum number of dropouts in a layer.
STREAMS_PER_LAYER = 8


def draw_seed() -> int:
    """Draw a seed from this rank's default generator of the CPU."""
    return int(torch.randint(2**60, (), device="cpu").item())


def seed_of(seed: int, stream: int, rank: int | None) -> int:
    """Return the seed of a dropout of a call with this seed: for divided activations, another one on each tp rank."""
    # Hashed, because the generator of the CPU uses only the lowest 32 bits.
    text = f"{seed} {stream} {rank}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@contextmanager
def random_numbers(seed: int, device: torch.device) -> Iterator[None]:
    """Seed a device's default generator for a block, and restore its state afterwards."""
    generator = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


def dropout(input: torch.Tensor, probability: float, seed: int) -> torch.Tensor:
    """Set elements to zero with a probability, and scale the others; the seed decides which."""
    with random_numbers(seed, input.device):
        return nn.functional.dropout(input, probability)
