"""State dicts of BERT, with the layers of ``transformers`` and with distributed ones."""

from shardwright.nn.huggingface.bert import (
    translate_hf_state_dict_to_smdistributed_bert,
    translate_state_dict_to_hf_bert,
)

__all__ = [
    "translate_hf_state_dict_to_smdistributed_bert",
    "translate_state_dict_to_hf_bert",
]
