"""The model and its batch, the same for every row: those of ``benches.gpt2``, larger."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import GPT2LMHeadModel

from benches.gpt2 import model as gpt2


@dataclass(frozen=True)
class Size:
    """Of the model, its batch, and where they are. Rows place 12 blocks.

    By default 91.7 M parameters with a tied head, on a CPU.
    """

    width: int = 768
    heads: int = 12
    batch: int = 8
    microbatches: int = 4
    sequence: int = 512
    vocabulary: int = gpt2.VOCABULARY
    device: str = "cpu"


DEFAULT_SIZE = Size()


def make_model(size: Size = DEFAULT_SIZE) -> GPT2LMHeadModel:
    """The same numbers in every process with such a device."""
    with torch.device(size.device):
        return gpt2.make_model(12, size.width, size.heads, size.sequence, size.vocabulary)


def make_batch(size: Size = DEFAULT_SIZE) -> torch.Tensor:
    """Token ids, the same in every process and every step."""
    return gpt2.make_batch(size.batch, size.sequence, size.vocabulary).to(size.device)
