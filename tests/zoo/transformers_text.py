"""Language models of ``transformers`` that read in one direction, and their like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from torch import nn

from tests.parity.models_language import LENGTH, VOCABULARY, causal_step, tokens
from tests.parity.problem import Phase, Problem, one

from .entry import Entry

LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2 * LENGTH,
}


def causal(build: Callable[[], nn.Module], reason: str, kind: str = "decoder", **more: Any) -> Entry:
    """An entry that predicts the next token."""
    return Entry(
        problem=Problem(build=one(build), batch=tokens, phases=(Phase(body=causal_step),)),
        kind=kind,
        reason=reason,
        **more,
    )


ENTRIES: dict[str, Entry] = {
    "Qwen3": causal(
        lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(head_dim=8, **LLAMA_LIKE)),
        "norms of queries and keys inside attention; one rotary table for all layers",
    ),
    "Gemma2": causal(
        lambda: transformers.Gemma2ForCausalLM(
            transformers.Gemma2Config(head_dim=8, sliding_window=4, query_pre_attn_scalar=8, **LLAMA_LIKE)
        ),
        "tied head, two masks for alternating layers, capped logits",
    ),
    "Mistral": causal(
        lambda: transformers.MistralForCausalLM(transformers.MistralConfig(sliding_window=4, **LLAMA_LIKE)),
        "a mask of a sliding window, made once and passed to every layer",
    ),
    "Mixtral": causal(
        lambda: transformers.MixtralForCausalLM(
            transformers.MixtralConfig(
                num_local_experts=3, num_experts_per_tok=2, experts_implementation="eager", output_router_logits=True,
                router_aux_loss_coef=0.1, **LLAMA_LIKE,
            )
        ),
        "a loss from router logits that hooks collect in every layer",
        kind="mixture of experts",
    ),
    "Mamba": causal(
        lambda: transformers.MambaForCausalLM(
            transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=5)
        ),
        "mixers compute with their children's weights",
        kind="state space",
    ),
}  # fmt: skip
