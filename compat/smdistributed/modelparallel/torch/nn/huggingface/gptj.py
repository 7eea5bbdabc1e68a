"""State dicts of GPT-J, with the layers of ``transformers`` and with distributed ones."""

from shardwright.nn.huggingface.gptj import (
    translate_hf_gptj_state_dict_to_smdistributed_gptj,
    translate_hf_state_dict_to_smdistributed_gptj,
    translate_state_dict_to_hf_gptj,
)

__all__ = [
    "translate_hf_gptj_state_dict_to_smdistributed_gptj",
    "translate_hf_state_dict_to_smdistributed_gptj",
    "translate_state_dict_to_hf_gptj",
]
