"""The model, its batch and its optimizer, the same for every row."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

BATCH, MICROBATCHES, SEQUENCE = 8, 4, 512
VOCABULARY = 8192
SEED = 1


def make_model() -> GPT2LMHeadModel:
    """12 blocks of width 768, 91.7 M parameters with a tied head; the same numbers in every process."""
    torch.manual_seed(SEED)
    config = GPT2Config(
        n_layer=12,
        n_embd=768,
        n_head=12,
        vocab_size=VOCABULARY,
        n_positions=SEQUENCE,
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


def make_batch() -> torch.Tensor:
    """Token ids, the same in every process and every step."""
    return torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(SEED))
