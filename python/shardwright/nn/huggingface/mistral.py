"""Mistral: its layers are those of Llama, with a window of attention."""

from __future__ import annotations

from typing import Any

from shardwright.nn.huggingface import llama
from shardwright.nn.huggingface.layer import Replaced


def _arguments(module: Any) -> dict[str, Any]:
    window = getattr(module.self_attn.config, "sliding_window", None)
    return {**llama.arguments(module), "window_size": window}


BLOCK = Replaced("transformers.models.mistral.modeling_mistral", "MistralDecoderLayer", _arguments, llama.TABLE)

translate_state_dict_to_hf_mistral = llama.TABLE.to_transformers
translate_hf_state_dict_to_smdistributed_mistral = llama.TABLE.to_distributed
