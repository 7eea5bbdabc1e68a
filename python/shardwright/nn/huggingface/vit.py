"""ViT: ``ViTLayer`` is a transformer layer."""

from __future__ import annotations

from typing import Any

from shardwright.nn.huggingface.layer import PRE_NORM, Replaced, activation
from shardwright.nn.huggingface.weights import Table, linear


def _arguments(module: Any) -> dict[str, Any]:
    attention = module.attention
    return {
        "num_attention_heads": attention.num_attention_heads,
        "attention_head_size": attention.head_dim,
        "hidden_size": attention.o_proj.out_features,
        "intermediate_size": module.mlp.fc1.out_features,
        "attention_dropout_prob": attention.attention_dropout,
        "hidden_dropout_prob": module.dropout.p,
        "activation": activation(module.mlp.activation_fn),
        "layernorm_epsilon": module.layernorm_before.eps,
        "query_key_value_bias": attention.q_proj.bias is not None,
        **PRE_NORM,
    }


_TABLE = Table(
    (
        *linear("attention.pre_layernorm", "layernorm_before"),
        *linear("attention.query_key_value", *(f"attention.{one}_proj" for one in "qkv")),
        *linear("attention.dense", "attention.o_proj"),
        *linear("output.pre_layernorm", "layernorm_after"),
        *linear("output.dense1", "mlp.fc1"),
        *linear("output.dense2", "mlp.fc2"),
    )
)

BLOCK = Replaced("transformers.models.vit.modeling_vit", "ViTLayer", _arguments, _TABLE)

translate_state_dict_to_hf_vit = _TABLE.to_transformers
translate_hf_state_dict_to_smdistributed_vit = _TABLE.to_distributed
