"""State dicts of RoBERTa, with the layers of ``transformers`` and with distributed ones."""

from shardwright.nn.huggingface.roberta import (
    translate_hf_state_dict_to_smdistributed_roberta,
    translate_state_dict_to_hf_roberta,
    translate_state_dict_to_smdistributed,
)

__all__ = [
    "translate_hf_state_dict_to_smdistributed_roberta",
    "translate_state_dict_to_hf_roberta",
    "translate_state_dict_to_smdistributed",
]
