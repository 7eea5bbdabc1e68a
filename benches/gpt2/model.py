"""The model, its batch, and what a training step is, the same for every configuration."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

NUM_BLOCKS = 8
VOCABULARY = 8192
SEQUENCE = 256
BATCH, MICROBATCHES = 16, 8
SEED = 1


def make_model(
    num_blocks: int = NUM_BLOCKS,
    width: int = 512,
    num_heads: int = 8,
    sequence: int = SEQUENCE,
    vocabulary: int = VOCABULARY,
) -> GPT2LMHeadModel:
    """29.5 M parameters by default, with a tied head; the same numbers in every process."""
    torch.manual_seed(SEED)
    config = GPT2Config(
        n_layer=num_blocks,
        n_embd=width,
        n_head=num_heads,
        vocab_size=vocabulary,
        n_positions=sequence,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        loss_type="ForCausalLM",
    )
    return GPT2LMHeadModel(config)


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """With a rate at which a wrong gradient shows in the next loss."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def make_batch(batch: int = BATCH, sequence: int = SEQUENCE, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """Token ids, the same in every process and every step."""
    return torch.randint(vocabulary, (batch, sequence), generator=torch.Generator().manual_seed(SEED))


def loss_of_logits(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """What the model computes from labels, for those who split it by hand."""
    labels = nn.functional.pad(ids, (0, 1), value=-100)[..., 1:]
    return nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.reshape(-1))
