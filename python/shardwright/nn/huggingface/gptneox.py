"""GPT-NeoX: ``GPTNeoXLayer`` is a transformer layer whose blocks may run side by side."""

from __future__ import annotations

from typing import Any

from shardwright.nn.huggingface.layer import ANY_LENGTH, PRE_NORM, Replaced, activation
from shardwright.nn.huggingface.weights import Table, Weight, linear


def _arguments(module: Any) -> dict[str, Any]:
    attention, config = module.attention, module.attention.config
    return {
        "num_attention_heads": config.num_attention_heads,
        "attention_head_size": attention.head_size,
        "hidden_size": attention.dense.out_features,
        "intermediate_size": module.mlp.dense_h_to_4h.out_features,
        "attention_dropout_prob": config.attention_dropout,
        "hidden_dropout_prob": module.post_mlp_dropout.p,
        "activation": activation(module.mlp.act),
        "layernorm_epsilon": module.input_layernorm.eps,
        "query_key_value_bias": attention.query_key_value.bias is not None,
        "dense_bias": attention.dense.bias is not None,
        "parallel_residual": module.use_parallel_residual,
        "causal_mask_size": ANY_LENGTH,
        **PRE_NORM,
        "layer_idx": getattr(attention, "layer_idx", None),
    }


_TABLE = Table(
    (
        *linear("attention.pre_layernorm", "input_layernorm"),
        Weight("attention.query_key_value.weight", ("attention.query_key_value.weight",), by_head=True),
        Weight("attention.query_key_value.bias", ("attention.query_key_value.bias",), by_head=True),
        *linear("attention.dense", "attention.dense"),
        *linear("output.pre_layernorm", "post_attention_layernorm"),
        *linear("output.dense1", "mlp.dense_h_to_4h"),
        *linear("output.dense2", "mlp.dense_4h_to_h"),
    ),
    ignored=("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq"),
    causal_mask="attention.bias",
)

BLOCK = Replaced(
    "transformers.models.gpt_neox.modeling_gpt_neox",
    "GPTNeoXLayer",
    _arguments,
    _TABLE,
    heads=lambda module: module.attention.config.num_attention_heads,
)

#: The number of heads is needed: query, key and value of each lie together.
translate_state_dict_to_hf_gptneox = _TABLE.to_transformers
translate_hf_state_dict_to_smdistributed_gptneox = _TABLE.to_distributed
