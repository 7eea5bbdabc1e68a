"""State dicts of whole language models of ``transformers``, and those of ``DistributedTransformerLMHead``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwright.errors import ConfigError
from shardwright.nn.huggingface.weights import State, Table

_EMBEDDING, _HEAD = "transformer.wte.weight", "lm_head.weight"
#: How names of ours begin, and how those of theirs do.
_PLACES = {
    "word_embedding.": "transformer.wte.",
    "position_embedding.": "transformer.wpe.",
    "transformer.seq_layers.": "transformer.h.",
    "transformer.layernorm.": "transformer.ln_f.",
    "lm_head.": "lm_head.",
}


@dataclass(frozen=True)
class LanguageModel:
    """A language model class of ``transformers`` that ``DistributedTransformerLMHead`` can be: GPT-2, GPT-Neo."""

    cls: str
    table: Table

    def to_distributed(self, state_dict: State) -> dict[str, torch.Tensor]:
        """A state dict of the whole model as one of ``smp.nn.DistributedTransformerLMHead``.

        Raises:
            ConfigError: A name is not one of the model's, a layer lacks a weight, or the output layer has a weight of
                its own.
        """
        head = state_dict.get(_HEAD)
        if head is not None and _EMBEDDING in state_dict and not torch.equal(head, state_dict[_EMBEDDING]):
            raise ConfigError(
                f"{_HEAD!r} and {_EMBEDDING!r} differ, but the output layer of DistributedTransformerLMHead has the "
                "weight of the word embedding"
            )
        places = {theirs: ours for ours, theirs in _PLACES.items()}
        renamed = {_moved(name, places, f"a {self.cls}"): tensor for name, tensor in state_dict.items()}
        return self.table.to_distributed(renamed)

    def to_transformers(self, state_dict: State, max_seq_len: int | None = None) -> dict[str, torch.Tensor]:
        """The way back, from whole weights.

        With ``max_seq_len``, causal masks of so many positions are added, as older versions of ``transformers`` have
        them.

        Raises:
            ConfigError: The model of ``transformers`` has no place for a weight, such as that of token types.
        """
        translated = self.table.to_transformers(state_dict, max_seq_len)
        where = f"a DistributedTransformerLMHead that is a {self.cls}"
        return {_moved(name, _PLACES, where): tensor for name, tensor in translated.items()}


def _moved(name: str, places: dict[str, str], model: str) -> str:
    for beginning, other in places.items():
        if name.startswith(beginning):
            return other + name.removeprefix(beginning)
    raise ConfigError(
        f"the state dict has {name!r}, which is no name of {model}; its names begin with {', '.join(places)}"
    )
