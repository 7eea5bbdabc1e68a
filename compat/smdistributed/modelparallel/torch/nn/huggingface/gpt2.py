"""State dicts of GPT-2 with the layers of ``transformers`` and with distributed ones, and hooks that register these."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from shardwright import ConfigError
from shardwright.caches import holds_cache
from shardwright.nn.huggingface.gpt2 import (
    translate_hf_block_state_dict_to_smdistributed,
    translate_hf_state_dict_to_smdistributed,
    translate_hf_state_dict_to_smdistributed_gpt2,
    translate_layer_state_dict_to_hf_gpt2_block,
    translate_state_dict_to_hf_gpt2,
)
from shardwright.nn.huggingface.layer import PRE_NORM, activation, added_mask, returns_tuple

__all__ = [
    "get_hf_gpt2_transformer_layer_hooks",
    "translate_hf_block_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed",
    "translate_hf_state_dict_to_smdistributed_gpt2",
    "translate_layer_state_dict_to_hf_gpt2_block",
    "translate_state_dict_to_hf_gpt2",
]

_LAYER = "DistributedTransformerLayer in the place of a GPT2Block"


def get_hf_gpt2_transformer_layer_hooks() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Return what makes ``smp.nn.DistributedTransformerLayer`` take the place of a script's own kind of ``GPT2Block``.

    Blocks of ``transformers`` themselves need no registration, and keep their weights; registered ones start anew.

    Returns:
        ``init_hook``, ``forward_hook`` and ``return_hook`` for ``smp.tp_register_with_module``.
    """
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    return _of_init, _of_forward(inspect.signature(GPT2Block.forward)), _of_result(returns_tuple(GPT2Block))


def _of_init(config: Any, layer_idx: int | None = None) -> tuple[tuple[()], dict[str, Any]]:
    from transformers.activations import ACT2FN

    heads, size = config.num_attention_heads, config.hidden_size
    return (), {
        "num_attention_heads": heads,
        "attention_head_size": size // heads,
        "hidden_size": size,
        "intermediate_size": config.n_inner if config.n_inner is not None else 4 * size,
        "attention_dropout_prob": config.attn_pdrop,
        "hidden_dropout_prob": config.resid_pdrop,
        "activation": activation(ACT2FN[config.activation_function]),
        "layernorm_epsilon": config.layer_norm_epsilon,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "causal_mask_size": config.max_position_embeddings,
        "add_cross_attention": config.add_cross_attention,
        **PRE_NORM,
        "scale_attention_scores": config.scale_attn_weights,
        "scale_attn_by_layer_idx": config.scale_attn_by_inverse_layer_idx,
        "attention_in_fp32": config.reorder_and_upcast_attn,
        "layer_idx": layer_idx,
    }


def _of_forward(signature: inspect.Signature) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> tuple[tuple[Any], dict[str, Any]]:
        bound = signature.bind(None, *args, **kwargs).arguments
        named = {**bound.get("kwargs", {}), **bound}
        for name, value in named.items():
            if holds_cache(value) or (name == "output_attentions" and value):
                raise ConfigError(f"{_LAYER}: the call has {name}, which it does not know; pass use_cache=False")
        hidden, crossed = named["hidden_states"], named.get("encoder_hidden_states")
        mask = added_mask(named.get("attention_mask"), hidden, hidden.shape[1], True)
        if crossed is None:
            return ((hidden, mask),), {}
        cross_mask = added_mask(named.get("encoder_attention_mask"), hidden, crossed.shape[1])
        return ((hidden, crossed, mask, cross_mask),), {}

    return forward


def _of_result(as_tuple: bool) -> Callable[[tuple[Any, ...]], Any]:
    def result(outputs: tuple[Any, ...]) -> Any:
        return outputs[:1] if as_tuple else outputs[0]

    return result
