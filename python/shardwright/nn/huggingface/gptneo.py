"""GPT-Neo: ``GPTNeoBlock`` is a transformer layer; every second one has a window of attention."""

from __future__ import annotations

from typing import Any

from shardwright.nn.huggingface.language_model import LanguageModel
from shardwright.nn.huggingface.layer import PRE_NORM, Replaced, activation
from shardwright.nn.huggingface.weights import Table, linear


def _arguments(module: Any) -> dict[str, Any]:
    attention = module.attn.attention
    config = attention.config
    return {
        "num_attention_heads": attention.num_heads,
        "attention_head_size": attention.head_dim,
        "hidden_size": attention.embed_dim,
        "intermediate_size": module.mlp.c_fc.out_features,
        "attention_dropout_prob": attention.attn_dropout.p,
        "hidden_dropout_prob": attention.resid_dropout.p,
        "activation": activation(module.mlp.act),
        "layernorm_epsilon": module.ln_1.eps,
        "causal_mask_size": config.max_position_embeddings,
        "window_size": config.window_size if module.attn.attention_type == "local" else None,
        "query_key_value_bias": False,
        "scale": 1.0,
        "attention_in_fp32": True,
        **PRE_NORM,
        "layer_idx": module.attn.layer_id,
    }


_TABLE = Table(
    (
        *linear("attention.pre_layernorm", "ln_1"),
        *linear("attention.query_key_value", *(f"attn.attention.{one}_proj" for one in "qkv")),
        *linear("attention.dense", "attn.attention.out_proj"),
        *linear("output.pre_layernorm", "ln_2"),
        *linear("output.dense1", "mlp.c_fc"),
        *linear("output.dense2", "mlp.c_proj"),
    ),
    ignored=("attn.attention.bias", "attn.attention.masked_bias"),
    causal_mask="attn.attention.bias",
)

BLOCK = Replaced("transformers.models.gpt_neo.modeling_gpt_neo", "GPTNeoBlock", _arguments, _TABLE)

translate_state_dict_to_hf_gptneo = _TABLE.to_transformers
translate_hf_state_dict_to_smdistributed_gptneo = _TABLE.to_distributed

#: The same for state dicts of whole models: ``GPTNeoForCausalLM`` and ``smp.nn.DistributedTransformerLMHead``.
_WHOLE = LanguageModel("GPTNeoForCausalLM", _TABLE)
translate_state_dict_to_hf_gptneo_lm_head = _WHOLE.to_transformers
translate_hf_state_dict_to_smdistributed_gptneo_lm_head = _WHOLE.to_distributed
