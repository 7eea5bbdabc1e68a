"""RoBERTa: its layers are those of BERT."""

from __future__ import annotations

from shardwright.nn.huggingface.bert import TABLE, arguments
from shardwright.nn.huggingface.layer import Replaced

BLOCK = Replaced("transformers.models.roberta.modeling_roberta", "RobertaLayer", arguments, TABLE)

translate_state_dict_to_hf_roberta = TABLE.to_transformers
translate_hf_state_dict_to_smdistributed_roberta = TABLE.to_distributed
translate_state_dict_to_smdistributed = TABLE.to_distributed
