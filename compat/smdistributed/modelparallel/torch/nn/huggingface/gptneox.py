"""State dicts of GPT-NeoX, with the layers of ``transformers`` and with distributed ones."""

from shardwright.nn.huggingface.gptneox import (
    translate_hf_state_dict_to_smdistributed_gptneox,
    translate_state_dict_to_hf_gptneox,
)

__all__ = [
    "translate_hf_state_dict_to_smdistributed_gptneox",
    "translate_state_dict_to_hf_gptneox",
]
