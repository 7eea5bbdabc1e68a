"""A small language model in the manner of GPT-2, and its batches."""

from __future__ import annotations

import shardwright as smp
import torch
from torch import nn

VOCABULARY, WIDTH, LENGTH, HEADS = 64, 32, 12, 4


class Block(nn.Module):
    """Attention and a small network, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.network = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = self.query_key_value(self.first(hidden)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        length = hidden.shape[1]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = query @ key.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
        seen = scores.masked_fill(later, -1e4).softmax(-1) @ value
        hidden = hidden + self.out(seen.transpose(1, 2).flatten(2))
        return hidden + self.network(self.second(hidden))


class Language(nn.Module):
    """Embeddings, blocks, a norm and a head; weights above and below 4 KiB, and a buffer that is used."""

    def __init__(self, blocks: int = 4, *, marked: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
        self.norm = nn.LayerNorm(WIDTH)
        with smp.tensor_parallelism(enabled=marked):
            self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("factor", torch.full((1,), 0.7))
        if marked:
            for block in self.blocks:
                for part in (block.query_key_value, block.out, *block.network):
                    smp.set_tensor_parallelism(part)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks(hidden))) * self.factor


def made(seed: int = 0, **keys: bool) -> Language:
    """The model with the weights of a seed."""
    torch.manual_seed(seed)
    return Language(**keys)


def batch(step: int, replica: int, size: int = 4) -> torch.Tensor:
    """Sequences in which every token follows from the last one, but for some noise: ids [size, LENGTH + 1]."""
    generator = torch.Generator().manual_seed(1000 * step + replica)
    ids = torch.randint(VOCABULARY, (size, 1), generator=generator)
    for _ in range(LENGTH):
        ids = torch.cat([ids, (5 * ids[:, -1:] + 3) % VOCABULARY], 1)
    noise = torch.randint(VOCABULARY, ids.shape, generator=generator)
    return torch.where(torch.rand(ids.shape, generator=generator) < 0.05, noise, ids)


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The cross entropy of each next token."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@smp.step
def train(model: smp.DistributedModel, ids: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model(ids[:, :-1]), ids)
    model.backward(loss)
    return loss
