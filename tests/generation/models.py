"""Small models of ``transformers`` that generate, in double precision with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

VOCABULARY = 40
#: Tokens of beginnings, and how many sequences there are.
LENGTH, BATCH = 5, 5

_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _gpt2() -> Any:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 16, "n_layer": 4, "n_head": 2}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **tokens))


def _llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_DECODER))


def _mistral() -> Any:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**_DECODER, head_dim=8, sliding_window=4))


def _gemma() -> Any:
    """Layers with a sliding window and without one in turns."""
    config = transformers.Gemma3TextConfig(**_DECODER, head_dim=8, sliding_window=4, layer_types=None)
    kinds = ["sliding_attention", "full_attention"] * 2
    config.layer_types = kinds
    return transformers.Gemma3ForCausalLM(config)


def _t5() -> Any:
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    tokens = {"decoder_start_token_id": 0, "eos_token_id": 2, "pad_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **tokens))


MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "gemma": _gemma,
    "t5": _t5,
}


def built(name: str) -> Any:
    """The model, the same on every rank, in evaluation mode."""
    torch.manual_seed(3)
    model = MODELS[name]().double().eval()
    for parameter in model.parameters():  # else all tokens are alike
        torch.nn.init.normal_(parameter, std=0.4)
    return model


def beginnings(batch: int = BATCH) -> dict[str, torch.Tensor]:
    """Tokens to go on from, the later ones with padding before them."""
    ids = torch.randint(3, VOCABULARY, (batch, LENGTH), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    for row in range(batch):
        padding = row % 3
        ids[row, :padding], mask[row, :padding] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}
