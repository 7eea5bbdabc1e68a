"""Mixtral: its attention is divided; its experts stay whole on each rank."""

from __future__ import annotations

from typing import Any

from shardwright.nn.huggingface import llama
from shardwright.nn.huggingface.layer import Replaced, TransformersAttention
from shardwright.nn.huggingface.weights import Table


def _arguments(module: Any) -> dict[str, Any]:
    return {
        **llama.attention_arguments(module),
        "window_size": getattr(module.config, "sliding_window", None),
        "pre_layernorm": False,
        "post_layernorm": False,
        "residual": False,
    }


BLOCK = Replaced(
    "transformers.models.mixtral.modeling_mixtral",
    "MixtralAttention",
    _arguments,
    Table(llama.attention_weights("", ""), path=r"(^|\.)self_attn\."),
    TransformersAttention,
)

translate_state_dict_to_hf_mixtral = BLOCK.to_theirs
translate_hf_state_dict_to_smdistributed_mixtral = BLOCK.to_ours
