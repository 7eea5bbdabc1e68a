"""Qwen3: its layers are those of Llama, with normalized queries and keys."""

from __future__ import annotations

from typing import Any

from shardwright.nn.huggingface import llama
from shardwright.nn.huggingface.layer import Replaced


def _arguments(module: Any) -> dict[str, Any]:
    return {**llama.arguments(module), "query_key_norm": True}


BLOCK = Replaced("transformers.models.qwen3.modeling_qwen3", "Qwen3DecoderLayer", _arguments, llama.TABLE)

translate_state_dict_to_hf_qwen3 = llama.TABLE.to_transformers
translate_hf_state_dict_to_smdistributed_qwen3 = llama.TABLE.to_distributed
