"""T5, ALBERT and a mixture of experts, each with a batch and a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

BATCH, MICROBATCHES, LENGTH, VOCABULARY = 16, 8, 128, 4096
SEED = 3
_WIDTH, _HEADS = 384, 6
Loss = Callable[[Any, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Problem:
    """A model to train.

    Attributes:
        make: Makes the model, the same numbers in every process.
        loss: The loss of the model for a microbatch of token ids.
    """

    make: Callable[[], nn.Module]
    loss: Loss


def batch() -> torch.Tensor:
    """Token ids, the same in every process and every step."""
    return torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(SEED))


def _t5() -> nn.Module:
    config = transformers.T5Config(
        d_model=_WIDTH,
        d_kv=_WIDTH // _HEADS,
        d_ff=4 * _WIDTH,
        num_layers=4,
        num_heads=_HEADS,
        vocab_size=VOCABULARY,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config)


def _albert() -> nn.Module:
    """One layer's parameters, used eight times."""
    config = transformers.AlbertConfig(
        vocab_size=VOCABULARY,
        embedding_size=128,
        hidden_size=_WIDTH,
        num_hidden_layers=8,
        num_hidden_groups=1,
        num_attention_heads=_HEADS,
        intermediate_size=4 * _WIDTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=LENGTH,
    )
    return transformers.AlbertForMaskedLM(config)


class _Expert(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH))


class _Experts(nn.Module):
    """Each token goes to one expert; an expert that no token chose is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.router = nn.Linear(_WIDTH, 4)
        self.experts = nn.ModuleList(_Expert() for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(hidden).flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(-1).max(-1)
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            places = (chosen == number).nonzero().squeeze(-1)
            if len(places):
                result = result.index_add(0, places, expert(tokens[places]) * weights[places, None])
        return hidden + result.view_as(hidden)


class _MixtureOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, _WIDTH)
        self.layers = nn.ModuleList(_Experts() for _ in range(4))
        self.head = nn.Linear(_WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits


def _loss_of_labels(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def _loss_of_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, -2), ids.flatten())


PROBLEMS = {
    "t5": Problem(_t5, _loss_of_labels),
    "albert": Problem(_albert, _loss_of_labels),
    "mixture_of_experts": Problem(_MixtureOfExperts, _loss_of_logits),
}
