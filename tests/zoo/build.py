"""Tiny models of ``transformers`` from their configurations, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from torch import nn

from tests.parity.models_language import LENGTH, VOCABULARY, causal_step, tokens
from tests.parity.problem import Phase, Problem, StepBody, one

from .entry import Entry

#: Sizes under the names that most configurations use. Enough layers for four ranks, and a small vocabulary, so that
#: embeddings are no more than a part of the whole.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "max_position_embeddings": 2 * LENGTH,
}
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def model(name: str, **keys: Any) -> Callable[[], nn.Module]:
    """The builder of the model class with this name, from these keys of its configuration."""

    def build() -> nn.Module:
        kind: Any = getattr(transformers, name)
        result: nn.Module = kind(kind.config_class(**keys))
        return result

    return build


def entry(
    build: Callable[[], nn.Module], batch: Any, body: StepBody, kind: str, reason: str, depths: tuple[int, ...] = (2, 4)
) -> Entry:
    """An entry with one model and one step function."""
    problem = Problem(build=one(build), batch=batch, phases=(Phase(body=body),))
    return Entry(problem=problem, kind=kind, reason=reason, depths=depths)


def causal(build: Callable[[], nn.Module], reason: str, kind: str = "decoder", **more: Any) -> Entry:
    """An entry that predicts the next token."""
    return entry(build, tokens, causal_step, kind, reason, **more)
