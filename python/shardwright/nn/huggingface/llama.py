"""Llama: ``LlamaDecoderLayer`` is a transformer layer, with rotary embeddings of the model's."""

from __future__ import annotations

from typing import Any

from shardwright.nn.huggingface.layer import ANY_LENGTH, PRE_NORM, Replaced, activation
from shardwright.nn.huggingface.weights import Table, Weight, linear


def attention_arguments(attention: Any) -> dict[str, Any]:
    """Of the attention of Llama and its relatives, without normalizations."""
    config = attention.config
    return {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "attention_head_size": attention.head_dim,
        "hidden_size": attention.o_proj.out_features,
        "attention_dropout_prob": attention.attention_dropout,
        "hidden_dropout_prob": 0.0,
        "query_key_value_bias": attention.q_proj.bias is not None,
        "dense_bias": attention.o_proj.bias is not None,
        "scale": attention.scaling,
        "causal_mask_size": ANY_LENGTH,
        "window_size": getattr(attention, "sliding_window", None),
        "layer_idx": attention.layer_idx,
    }


def arguments(module: Any) -> dict[str, Any]:
    """Of a layer of Llama or a relative."""
    return {
        **attention_arguments(module.self_attn),
        "intermediate_size": module.mlp.up_proj.out_features,
        "activation": activation(module.mlp.act_fn),
        "gated": True,
        "mlp_bias": module.mlp.up_proj.bias is not None,
        "normalization": "rms_norm",
        "layernorm_epsilon": module.input_layernorm.variance_epsilon,
        **PRE_NORM,
    }


def attention_weights(ours: str, theirs: str) -> tuple[Weight, ...]:
    """Of the attention; the names are prefixes that end with a dot, or empty."""
    return (
        *linear(f"{ours}query_key_value", *(f"{theirs}{one}_proj" for one in "qkv")),
        *linear(f"{ours}dense", f"{theirs}o_proj"),
        *linear(f"{ours}query_norm", f"{theirs}q_norm"),
        *linear(f"{ours}key_norm", f"{theirs}k_norm"),
    )


TABLE = Table(
    (
        *linear("attention.pre_layernorm", "input_layernorm"),
        *attention_weights("attention.", "self_attn."),
        *linear("output.pre_layernorm", "post_attention_layernorm"),
        *linear("output.dense1", "mlp.up_proj"),
        *linear("output.gate", "mlp.gate_proj"),
        *linear("output.dense2", "mlp.down_proj"),
    ),
    ignored=("self_attn.rotary_emb.inv_freq",),
)

BLOCK = Replaced("transformers.models.llama.modeling_llama", "LlamaDecoderLayer", arguments, TABLE)

translate_state_dict_to_hf_llama = TABLE.to_transformers
translate_hf_state_dict_to_smdistributed_llama = TABLE.to_distributed
