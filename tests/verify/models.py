"""The models of the verification's tests, and how they are trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

VOCABULARY = 37
BATCH = 8
LENGTH = 6


@dataclass(frozen=True)
class Case:
    """A model, its step function's body, and its batch.

    Attributes:
        build: Makes the model, after seeding.
        body: The step function.
        batch: Its arguments after the model, from a seeded generator.
        pins: Modules by the pp_rank they go to; the rest goes to pp_rank 0.
    """

    build: Callable[[], nn.Module]
    body: Callable[..., Any]
    batch: Callable[[torch.Generator], tuple[Any, ...]]
    pins: dict[str, int]


def gpt2(dropout: float = 0.0) -> nn.Module:
    from tests.parity.models_language import gpt2

    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return gpt2(vocab_size=VOCABULARY, n_positions=LENGTH, loss_type="ForCausalLM", **dropouts)


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=2,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
    )


class Convolutions(nn.Module):
    """A small network for images with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(images)).mean(dim=(2, 3)))


class Chain(nn.Module):
    """Layers one after another, with an activation and dropout of their own between them, and a residual branch."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.act = nn.Tanh()
        self.second = nn.Linear(6, 6)
        self.drop = nn.Dropout(dropout)
        self.branch = nn.Linear(6, 6)
        self.third = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.second(self.act(self.first(inputs))))
        hidden = hidden + self.branch(hidden)
        return self.last(self.third(hidden))


class Counted:
    """An object with slots."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class Counting(nn.Module):
    """Counts its calls in an object and in a tensor, and computes with the counts."""

    def __init__(self) -> None:
        super().__init__()
        self.counted, self.total = Counted(), torch.zeros(1)
        self.before, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.first = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.counted.calls += 1
        self.total.add_(1)
        return self.last(self.first(self.before(inputs)) * (self.counted.calls + self.total))


class Tied(nn.Module):
    """An embedding and a head with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.words = nn.ModuleDict({"embedding": nn.Embedding(VOCABULARY, 6), "head": nn.Linear(6, VOCABULARY)})
        self.words["head"].weight = self.words["embedding"].weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.words["head"](self.body(self.words["embedding"](ids)))


def language(model: Any, ids: torch.Tensor) -> Any:
    loss = model(input_ids=ids, labels=ids).loss
    model.backward(loss)
    return loss


def labelled(model: Any, inputs: torch.Tensor, labels: torch.Tensor) -> Any:
    logits = model(inputs)
    loss = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
    model.backward(loss)
    return {"loss": loss, "logits": logits}


def tokens(generator: torch.Generator) -> tuple[torch.Tensor]:
    return (torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=generator),)


def vectors(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(BATCH, 6, generator=generator), torch.randint(3, (BATCH,), generator=generator)


def unequal_labels(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, labels = vectors(generator)
    labels[[0, 3]] = -100
    return inputs, labels


def images(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(BATCH, 3, 8, 8, generator=generator), torch.randint(5, (BATCH,), generator=generator)


def words(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    (ids,) = tokens(generator)
    return ids, ids


GPT2_PINS = {"transformer.h.1": 1, "transformer.h.2": 1}
CHAIN_PINS = {"second": 1, "drop": 1, "branch": 1, "third": 1}

CASES = {
    "GPT-2": Case(gpt2, language, tokens, GPT2_PINS),
    "GPT-2 with dropout": Case(lambda: gpt2(0.2), language, tokens, GPT2_PINS),
    "T5": Case(t5, language, tokens, {"encoder.block.1": 1, "decoder.block.0": 1}),
    "CNN": Case(Convolutions, labelled, images, {"second": 1}),
    "chain": Case(Chain, labelled, vectors, CHAIN_PINS),
    "chain with dropout": Case(lambda: Chain(0.3), labelled, vectors, CHAIN_PINS),
    "unequal labels": Case(Chain, labelled, unequal_labels, CHAIN_PINS),
    "counting": Case(Counting, labelled, vectors, {"first": 1}),
    "tied": Case(Tied, labelled, words, {"words": 1}),
}
