"""Each module of ``smp.nn`` alone, between linear layers, so that gradients of its input are seen as well."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import shardwright as smp
import torch
from shardwright.tensor_parallel.communicators import bwd_allreduce_for_tp, fwd_allreduce_for_tp
from shardwright.tensor_parallel.module import distributed_modules
from torch import nn

from tests.tensor_parallel.plain import (
    PlainAttention,
    PlainLanguageModel,
    PlainLayer,
    PlainOutput,
    PlainTransformer,
)

from .problem import LENGTH, Batch, Problem, normal

WIDTH, WORDS, HEADS, SIZE, CROSS_LENGTH = 16, 12, 8, 2, 3
NO_DROPOUT: dict[str, Any] = {"attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
HIDDEN: dict[str, Any] = {"hidden_size": WIDTH, "layernorm_epsilon": 1e-5}
PRE: dict[str, Any] = {"pre_layernorm": True, "post_layernorm": False}
POST: dict[str, Any] = {"pre_layernorm": False, "post_layernorm": True}
BOTH: dict[str, Any] = {"pre_layernorm": True, "post_layernorm": True}
ATTENTION: dict[str, Any] = {"num_attention_heads": HEADS, "attention_head_size": SIZE, **NO_DROPOUT, **HIDDEN}
OUTPUT: dict[str, Any] = {"intermediate_size": 24, "hidden_dropout_prob": 0.0, **HIDDEN}
LAYER: dict[str, Any] = {**ATTENTION, **OUTPUT}
GATED: dict[str, Any] = {
    "num_key_value_heads": 4,
    "normalization": "rms_norm",
    "gated": True,
    "activation": "silu",
    "query_key_value_bias": False,
    "dense_bias": False,
    "mlp_bias": False,
    "query_key_norm": True,
    "causal_mask_size": 8,
}


class Around(nn.Module):
    """A module between two linear layers.

    Attributes:
        names: What the divided module's tuple has in it, from its second element; empty for a module of one tensor.
        divided: Whether the module is the divided one.
    """

    def __init__(self, middle: nn.Module, names: Sequence[str], width: int, given: Sequence[str]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, width)
        self.middle = middle
        self.last = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.zeros(1, HEADS, LENGTH, LENGTH)) if "position_bias" in given else None
        self.names = tuple(names)
        self.divided = False

    def forward(self, batch: Batch) -> torch.Tensor:
        given = {name: one for name, one in batch.items() if name not in ("x", "y")}
        x = batch["x"]
        hidden = self.first(x) if x.is_floating_point() else x
        if "cross_states" in given:
            given["cross_states"] = self.first(given["cross_states"])
        if self.bias is not None:
            given["position_bias"] = self.bias
        if self.divided and self.names:
            result = self.middle((hidden, *(given.get(name) for name in self.names)))
            hidden = result[0] if isinstance(result, tuple) else result
        else:
            hidden = self.middle(hidden, **given)
        return self.last(hidden)


class PlainFlash(nn.Module):
    """Causal attention by its formula, called as the layer is below."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = (one.transpose(1, 2) for one in hidden.unflatten(-1, (3, HEADS, SIZE)).unbind(2))
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        scores = (query @ key.mT / SIZE**0.5).masked_fill(later, -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


class Flash(nn.Module):
    """The layer of ``smp.nn``, with heads side by side again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = smp.nn.FlashAttentionLayer(attention_dropout_prob=0.0)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.layer(hidden.unflatten(-1, (3, HEADS, SIZE)), causal=True).transpose(1, 2).flatten(2)


class Scored(nn.Module):
    """Words scored by the weight that embeds them; adds the loss to the hidden states."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        embedding: Any = self.embedding
        target = ids.roll(1, -1)
        if isinstance(embedding, nn.Embedding):
            logits = (hidden + embedding(ids)) @ embedding.weight.t()
            return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()) + hidden
        embedded = hidden + fwd_allreduce_for_tp(embedding.partial(ids))
        logits = bwd_allreduce_for_tp(embedded) @ embedding.weight.t()
        return smp.nn.vocabulary_parallel_cross_entropy(logits, target) + hidden


def _loss(model: Any, batch: Batch) -> torch.Tensor:
    return (model(batch) - batch["y"]).square().mean()


def _inputs(samples: int, random: torch.Generator, names: Sequence[str], width: int) -> Batch:
    batch = {"x": normal(random, samples, LENGTH, WIDTH), "y": normal(random, samples, LENGTH, WIDTH)}
    for name in names:
        if name == "ids":
            batch["ids"] = torch.randint(0, WORDS, (samples, LENGTH), generator=random)
        elif name == "words":
            batch["x"] = torch.randint(0, WORDS, (samples, LENGTH), generator=random)
        elif name == "cross_states":
            batch[name] = normal(random, samples, CROSS_LENGTH, WIDTH)
        elif name == "attention_mask":
            batch[name] = torch.randint(0, 2, (samples, LENGTH), generator=random)
        elif name in ("mask", "cross_mask"):
            batch[name] = normal(random, samples, 1, 1, LENGTH if name == "mask" else CROSS_LENGTH)
        elif name == "cos":
            angles = normal(random, samples, LENGTH, width // 2).repeat_interleave(2, -1)
            batch |= {"cos": angles.cos(), "sin": angles.sin()}
    return batch


def _problem(
    whole: Callable[[], nn.Module],
    divided: Callable[[], nn.Module],
    names: Sequence[str] = (),
    given: Sequence[str] = (),
    width: int = WIDTH,
    pins: tuple[str, ...] = ("middle",),
) -> Problem:
    """A problem of a module and its plain counterpart, whose weights have the same names."""

    def build() -> nn.Module:
        model = Around(whole(), names, width, given).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.4 + (parameter.dim() == 1))
        return model

    def divide(model: nn.Module) -> nn.Module:
        assert isinstance(model, Around), "made above"
        found = copy.deepcopy(model)
        found.middle, found.divided = divided(), True
        plain = model.middle
        done: list[str] = []
        for name, one in distributed_modules(found.middle):
            if not any(name.startswith(f"{outer}." if outer else "") for outer in done):
                one.load_whole_state_dict(plain.get_submodule(name).state_dict())
                done.append(name)
        if not done:
            found.middle.load_state_dict(plain.state_dict())
        return found

    return Problem(build, lambda samples, random: _inputs(samples, random, given, SIZE), _loss, divide, {}, pins)


_SELF = ("mask", "position_bias", "cos", "sin")
_CROSS = ("cross_states", "mask", "cross_mask", "position_bias", "cos", "sin")


def _layer(options: dict[str, Any], given: Sequence[str], cross: bool = False) -> Problem:
    options = {**LAYER, **options}
    names = _CROSS if cross else _SELF
    return _problem(lambda: PlainLayer(**options), lambda: smp.nn.DistributedTransformerLayer(**options), names, given)


def _attention(options: dict[str, Any], names: Sequence[str], given: Sequence[str], cross: bool = False) -> Problem:
    options = {**ATTENTION, **options}
    return _problem(
        lambda: PlainAttention(cross, **options),
        lambda: smp.nn.DistributedAttentionLayer(**options, cross_attention=cross),
        names,
        given,
    )


def _linears(**options: Any) -> Problem:
    return _problem(
        lambda: nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, WIDTH)),
        lambda: nn.Sequential(
            smp.nn.ColumnParallelLinear(WIDTH, 24, **options),
            nn.Tanh(),
            smp.nn.RowParallelLinear(24, WIDTH, **options),
        ),
    )


_TRANSFORMER: dict[str, Any] = {**LAYER, **BOTH, "causal_mask_size": 8}
#: As many words as channels, so that logits are as wide as what the last linear layer takes.
_LANGUAGE_MODEL: dict[str, Any] = {"num_layers": 2, "vocab_size": WIDTH, "num_positions": LENGTH + 1, **_TRANSFORMER}

PROBLEMS: dict[str, Problem] = {
    "DistributedLinear": _problem(lambda: nn.Linear(WIDTH, WIDTH), lambda: smp.nn.DistributedLinear(WIDTH, WIDTH)),
    "DistributedEmbedding": _problem(
        lambda: nn.Embedding(WORDS, WIDTH), lambda: smp.nn.DistributedEmbedding(WORDS, WIDTH), given=("words",)
    ),
    "DistributedLayerNorm": _problem(lambda: nn.LayerNorm(WIDTH), lambda: smp.nn.DistributedLayerNorm(WIDTH)),
    "DistributedRMSNorm": _problem(
        lambda: nn.RMSNorm(WIDTH, eps=1e-5), lambda: smp.nn.DistributedRMSNorm(WIDTH, eps=1e-5)
    ),
    "DistributedAttentionLayer": _attention(POST, _SELF, ("mask", "position_bias")),
    "DistributedAttentionLayer, cross": _attention(PRE, ("cross_states", "mask"), ("cross_states",), cross=True),
    "DistributedTransformerOutputLayer": _problem(
        lambda: PlainOutput(**OUTPUT, **PRE), lambda: smp.nn.DistributedTransformerOutputLayer(**OUTPUT, **PRE)
    ),
    "DistributedTransformerLayer": _layer({**BOTH, "causal_mask_size": 8}, ("mask", "position_bias")),
    "DistributedTransformerLayer, cross": _layer(
        {**POST, "add_cross_attention": True}, ("cross_states", "mask", "cross_mask"), cross=True
    ),
    "DistributedTransformerLayer, parallel": _layer(
        {**PRE, "rotary_interleaved": True, "parallel_residual": True, "shared_layernorm": True}, ("mask", "cos")
    ),
    "DistributedTransformerLayer, gated": _layer({**PRE, **GATED}, ()),
    "DistributedTransformer": _problem(
        lambda: PlainTransformer(3, **_TRANSFORMER),
        lambda: smp.nn.DistributedTransformer(3, **_TRANSFORMER),
        _SELF,
        ("mask", "position_bias"),
        pins=("middle.seq_layers.1", "last"),
    ),
    "DistributedTransformerLMHead": _problem(
        lambda: PlainLanguageModel(**_LANGUAGE_MODEL),
        lambda: smp.nn.DistributedTransformerLMHead(**_LANGUAGE_MODEL),
        ("attention_mask",),
        ("words", "attention_mask"),
        pins=("middle.transformer.seq_layers.1", "last"),
    ),
    "VocabularyParallelEmbedding": _problem(
        lambda: nn.Embedding(WORDS, WIDTH), lambda: smp.nn.VocabularyParallelEmbedding(WORDS, WIDTH), given=("words",)
    ),
    "ColumnParallelLinear and RowParallelLinear": _linears(),
    "ColumnParallelLinear and RowParallelLinear, sequence": _linears(sequence_dim=0),
    "ColumnParallelLinear and RowParallelLinear, asynchronous": _linears(sequence_dim=0, asynchronous=True),
    "vocabulary_parallel_cross_entropy": _problem(
        lambda: Scored(nn.Embedding(WORDS, WIDTH)),
        lambda: Scored(smp.nn.VocabularyParallelEmbedding(WORDS, WIDTH)),
        given=("ids",),
    ),
    "FlashAttentionLayer": _problem(PlainFlash, Flash, width=3 * WIDTH, pins=("middle", "last")),
    "FusedLayerNorm": _problem(lambda: nn.LayerNorm(WIDTH), lambda: smp.nn.FusedLayerNorm(WIDTH)),
}
