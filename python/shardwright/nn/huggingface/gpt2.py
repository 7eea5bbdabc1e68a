"""GPT-2: ``GPT2Block`` is a transformer layer."""

from __future__ import annotations

import dataclasses
from typing import Any

from shardwright.nn.huggingface.language_model import LanguageModel
from shardwright.nn.huggingface.layer import PRE_NORM, Replaced, activation
from shardwright.nn.huggingface.weights import Table, linear


def _arguments(module: Any) -> dict[str, Any]:
    attention, config = module.attn, module.attn.config
    return {
        "num_attention_heads": attention.num_heads,
        "attention_head_size": attention.head_dim,
        "hidden_size": attention.embed_dim,
        "intermediate_size": module.mlp.c_fc.nf,
        "attention_dropout_prob": attention.attn_dropout.p,
        "hidden_dropout_prob": attention.resid_dropout.p,
        "activation": activation(module.mlp.act),
        "layernorm_epsilon": module.ln_1.eps,
        "causal_mask_size": config.max_position_embeddings,
        "add_cross_attention": hasattr(module, "crossattention"),
        **PRE_NORM,
        "scale_attention_scores": attention.scale_attn_weights,
        "scale_attn_by_layer_idx": attention.scale_attn_by_inverse_layer_idx,
        "attention_in_fp32": attention.reorder_and_upcast_attn,
        "layer_idx": attention.layer_idx,
    }


_TABLE = Table(
    (
        *linear("attention.pre_layernorm", "ln_1"),
        *linear("attention.query_key_value", "attn.c_attn", transposed=True),
        *linear("attention.dense", "attn.c_proj", transposed=True),
        *linear("cross_attention.pre_layernorm", "ln_cross_attn"),
        *linear("cross_attention.query", "crossattention.q_attn", transposed=True),
        *linear("cross_attention.key_value", "crossattention.c_attn", transposed=True),
        *linear("cross_attention.dense", "crossattention.c_proj", transposed=True),
        *linear("output.pre_layernorm", "ln_2"),
        *linear("output.dense1", "mlp.c_fc", transposed=True),
        *linear("output.dense2", "mlp.c_proj", transposed=True),
    ),
    ignored=("attn.bias", "attn.masked_bias", "crossattention.bias", "crossattention.masked_bias"),
    causal_mask="attn.bias",
)

BLOCK = Replaced("transformers.models.gpt2.modeling_gpt2", "GPT2Block", _arguments, _TABLE)

translate_state_dict_to_hf_gpt2 = _TABLE.to_transformers
translate_hf_state_dict_to_smdistributed_gpt2 = _TABLE.to_distributed
translate_hf_state_dict_to_smdistributed = _TABLE.to_distributed

#: For state dicts of one layer, too, whose names have nothing before them.
_LAYER = dataclasses.replace(_TABLE, path=r"^|(^|\.)\d+\.")
translate_layer_state_dict_to_hf_gpt2_block = _LAYER.to_transformers
translate_hf_block_state_dict_to_smdistributed = _LAYER.to_distributed

#: The same for state dicts of whole models: ``GPT2LMHeadModel`` and ``smp.nn.DistributedTransformerLMHead``.
_WHOLE = LanguageModel("GPT2LMHeadModel", _TABLE)
translate_state_dict_to_hf_gpt2_lm_head = _WHOLE.to_transformers
translate_hf_state_dict_to_smdistributed_gpt2_lm_head = _WHOLE.to_distributed
