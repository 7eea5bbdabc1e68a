"""Decoders, state-space models and mixtures of experts of ``transformers``."""

from __future__ import annotations

from typing import Any

from tests.parity.models_language import GPT2_SIZES, LENGTH, VOCABULARY

from .entry import Entry
from .entry_builders import SIZES, causal, model

GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 1}
EXPERTS: dict[str, Any] = {**GROUPED, "num_experts_per_tok": 2, "experts_implementation": "eager"}
GPT: dict[str, Any] = {**GPT2_SIZES, "n_layer": 5}
SPARSE = "mixture of experts"
STATES = "state space"

ENTRIES: dict[str, Entry] = {
    "Qwen3": causal(
        model("Qwen3ForCausalLM", head_dim=8, **GROUPED), "norms of queries and keys; one rotary table for all layers"
    ),
    "Gemma2": causal(
        model("Gemma2ForCausalLM", head_dim=8, sliding_window=4, query_pre_attn_scalar=8, **GROUPED),
        "tied head, two masks for alternating layers, capped logits",
    ),
    "Mistral": causal(
        model("MistralForCausalLM", sliding_window=4, **GROUPED), "the mask of a sliding window, shared by all layers"
    ),
    "Phi-3": causal(
        model("Phi3ForCausalLM", pad_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attention_dropout=0.0, **GROUPED),
        "queries, keys and values are views of one projection",
    ),
    "GPT-J": causal(
        model("GPTJForCausalLM", rotary_dim=4, **GPT), "attention and feed-forward side by side"
    ),
    "GPT-Neo": causal(
        model(
            "GPTNeoForCausalLM", vocab_size=VOCABULARY, hidden_size=16, num_layers=4, num_heads=2, intermediate_size=24,
            attention_types=[[["global", "local"], 2]], window_size=4, max_position_embeddings=2 * LENGTH,
            resid_dropout=0.0, embed_dropout=0.0, attention_dropout=0.0, bos_token_id=0, eos_token_id=0,
        ),
        "causal masks in boolean buffers of every layer",
    ),
    "GPT-BigCode": causal(model("GPTBigCodeForCausalLM", **GPT), "one key and value for all heads, tied head"),
    "CodeGen": causal(
        model("CodeGenForCausalLM", rotary_dim=4, **(GPT | {"n_head": 4})), "a permuted projection, cut into views"
    ),
    "OPT": causal(
        model(
            "OPTForCausalLM", vocab_size=VOCABULARY, hidden_size=16, ffn_dim=24, num_hidden_layers=5, dropout=0.0,
            num_attention_heads=2, max_position_embeddings=2 * LENGTH, word_embed_proj_dim=8, layerdrop=0.0,
        ),
        "embeddings narrower than the layers, projected in and out, and tied",
    ),
    "Falcon": causal(
        model("FalconForCausalLM", alibi=True, new_decoder_architecture=False, **SIZES),
        "position biases made from the mask and passed down",
    ),
    "StableLM": causal(
        model("StableLmForCausalLM", use_parallel_residual=True, attention_dropout=0.0, **GROUPED),
        "parallel residuals with rotary embedding of a part of each head",
    ),
    "Cohere": causal(model("CohereForCausalLM", **GROUPED), "scaled logits of a tied head"),
    "OLMo-2": causal(model("Olmo2ForCausalLM", **GROUPED), "norms behind each branch instead of before"),
    "BitNet": causal(model("BitNetForCausalLM", **GROUPED), "norms inside attention and feed-forward"),
    "Mixtral": causal(
        model(
            "MixtralForCausalLM", num_local_experts=3, output_router_logits=True, router_aux_loss_coef=0.1, **EXPERTS
        ),
        "a loss from router logits that hooks collect in every layer",
        SPARSE,
    ),
    "Qwen3-MoE": causal(
        model(
            "Qwen3MoeForCausalLM", num_experts=3, moe_intermediate_size=12, head_dim=8, output_router_logits=True,
            router_aux_loss_coef=0.1, decoder_sparse_step=2, **EXPERTS,
        ),
        "sparse and dense layers in turn; experts without a token",
        SPARSE,
    ),
    "OLMoE": causal(
        model("OlmoeForCausalLM", num_experts=4, output_router_logits=True, router_aux_loss_coef=0.1, **EXPERTS),
        "a loss from router logits, norms of queries and keys",
        SPARSE,
    ),
    "DeepSeek-V3": causal(
        model(
            "DeepseekV3ForCausalLM", n_routed_experts=4, moe_intermediate_size=12, n_shared_experts=1, n_group=2,
            topk_group=1, first_k_dense_replace=2, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, v_head_dim=8,
            qk_nope_head_dim=4, **(EXPERTS | {"num_key_value_heads": 2}),
        ),
        "low-rank attention; routing by scores with a bias that is a buffer",
        SPARSE,
    ),
    "GPT-OSS": causal(
        model(
            "GptOssForCausalLM", num_local_experts=3, head_dim=8, sliding_window=4, output_router_logits=True,
            router_aux_loss_coef=0.1, **EXPERTS,
        ),
        "attention sinks that are parameters; experts in one tensor",
        SPARSE,
    ),
    "Mamba": causal(
        model("MambaForCausalLM", vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=5),
        "mixers compute with their children's weights",
        STATES,
    ),
    "Mamba-2": causal(
        model(
            "Mamba2ForCausalLM", vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=5, head_dim=8,
            num_heads=4, n_groups=2, chunk_size=4,
        ),
        "scans in chunks, and reads a child's weights",
        STATES,
    ),
    "Jamba": causal(
        model(
            "JambaForCausalLM", attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
            num_experts=3, mamba_d_state=4, mamba_dt_rank=4, use_mamba_kernels=False, output_router_logits=True,
            router_aux_loss_coef=0.1, **EXPERTS,
        ),
        "state-space, attention and expert layers in turn",
        STATES,
    ),
    "RWKV": causal(
        model(
            "RwkvForCausalLM", vocab_size=VOCABULARY, context_length=2 * LENGTH, hidden_size=16, num_hidden_layers=5,
            attention_hidden_size=16, intermediate_size=24, rescale_every=0,
        ),
        "a state that every layer updates in place and passes on",
        STATES,
    ),
    "RecurrentGemma": causal(
        model(
            "RecurrentGemmaForCausalLM", lru_width=16, attention_window_size=4, conv1d_width=2,
            **(GROUPED | {"num_hidden_layers": 5}),
        ),
        "recurrences with a gradient function of their own, tied head",
        STATES,
    ),
}  # fmt: skip
