"""The model and its batch, the same for every row: those of ``benches.gpt2``, larger."""

from __future__ import annotations

import torch
from transformers import GPT2LMHeadModel

from benches.gpt2 import model as gpt2

BATCH, MICROBATCHES, SEQUENCE = 8, 4, 512


def make_model() -> GPT2LMHeadModel:
    """12 blocks of width 768, 91.7 M parameters with a tied head; the same numbers in every process."""
    return gpt2.make_model(num_blocks=12, width=768, num_heads=12, sequence=SEQUENCE)


def make_batch() -> torch.Tensor:
    """Token ids, the same in every process and every step."""
    return gpt2.make_batch(BATCH, SEQUENCE)
