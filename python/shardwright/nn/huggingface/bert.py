"""BERT: ``BertLayer`` is a transformer layer."""

from __future__ import annotations

from typing import Any

from shardwright.errors import ConfigError
from shardwright.nn.huggingface.layer import ANY_LENGTH, Replaced, activation
from shardwright.nn.huggingface.weights import Table, linear


def arguments(module: Any) -> dict[str, Any]:
    """Of a layer of BERT or RoBERTa; raise if its positions are relative to each other."""
    attention, output = module.attention.self, module.attention.output
    kind = getattr(attention, "position_embedding_type", None) or "absolute"
    if kind != "absolute":
        raise ConfigError(f"its position_embedding_type is {kind!r}; supported: 'absolute'")
    return {
        "num_attention_heads": attention.num_attention_heads,
        "attention_head_size": attention.attention_head_size,
        "hidden_size": output.dense.out_features,
        "intermediate_size": module.intermediate.dense.out_features,
        "attention_dropout_prob": attention.dropout.p,
        "hidden_dropout_prob": output.dropout.p,
        "activation": activation(module.intermediate.intermediate_act_fn),
        "layernorm_epsilon": output.LayerNorm.eps,
        "causal_mask_size": ANY_LENGTH if module.is_decoder else None,
        "add_cross_attention": hasattr(module, "crossattention"),
        "pre_layernorm": False,
        "post_layernorm": True,
        "layer_idx": getattr(attention, "layer_idx", None),
    }


TABLE = Table(
    (
        *linear("attention.query_key_value", *(f"attention.self.{one}" for one in ("query", "key", "value"))),
        *linear("attention.dense", "attention.output.dense"),
        *linear("attention.layernorm", "attention.output.LayerNorm"),
        *linear("cross_attention.query", "crossattention.self.query"),
        *linear("cross_attention.key_value", "crossattention.self.key", "crossattention.self.value"),
        *linear("cross_attention.dense", "crossattention.output.dense"),
        *linear("cross_attention.layernorm", "crossattention.output.LayerNorm"),
        *linear("output.dense1", "intermediate.dense"),
        *linear("output.dense2", "output.dense"),
        *linear("output.layernorm", "output.LayerNorm"),
    )
)

BLOCK = Replaced("transformers.models.bert.modeling_bert", "BertLayer", arguments, TABLE)

translate_state_dict_to_hf_bert = TABLE.to_transformers
translate_hf_state_dict_to_smdistributed_bert = TABLE.to_distributed
