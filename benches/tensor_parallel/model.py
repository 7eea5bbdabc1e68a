"""The GPT-2 of ``benches.gpt2`` in plain torch, with linear layers that each side divides in its own way."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

NUM_LAYERS = 8
WIDTH, INTERMEDIATE, HEADS = 512, 2048, 8
HEAD_SIZE = WIDTH // HEADS
VOCABULARY, SEQUENCE, MICROBATCHES = 8192, 256, 8
EPSILON = 1e-5
#: The linear layers of a block, divided over output channels or over input channels.
COLUMNS, ROWS = ("attention.qkv", "mlp.dense1"), ("attention.proj", "mlp.dense2")

State = Mapping[str, torch.Tensor]


class Attention(nn.Module):
    """Causal self-attention of as many heads as its linear layers have."""

    def __init__(self) -> None:
        """The whole; rows of ``qkv`` are ordered by head, so that a slice of them has whole heads."""
        super().__init__()
        self.qkv: nn.Module = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj: nn.Module = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """From [N, S, WIDTH] the same shape."""
        projected = self.qkv(hidden)
        query, key, value = projected.view(*projected.shape[:2], -1, 3, HEAD_SIZE).permute(3, 0, 2, 1, 4)
        context = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: torch.Tensor = self.proj(context.transpose(1, 2).flatten(2))
        return output


class MLP(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        """The whole."""
        super().__init__()
        self.dense1: nn.Module = nn.Linear(WIDTH, INTERMEDIATE)
        self.dense2: nn.Module = nn.Linear(INTERMEDIATE, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """From [N, S, WIDTH] the same shape."""
        output: torch.Tensor = self.dense2(nn.functional.gelu(self.dense1(hidden), approximate="tanh"))
        return output


class Block(nn.Module):
    """A transformer layer."""

    def __init__(self) -> None:
        """The whole."""
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, EPSILON) for _ in range(2))
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """From [N, S, WIDTH] the same shape."""
        hidden = hidden + self.attention(self.norm1(hidden))
        output: torch.Tensor = hidden + self.mlp(self.norm2(hidden))
        return output


class Model(nn.Module):
    """Embeddings, a body, and a head whose weight is that of the embedding."""

    def __init__(self, body: nn.Module) -> None:
        """Embeddings, normalization and head, which no side divides, are the same around every body."""
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.body = body
        self.norm = nn.LayerNorm(WIDTH, EPSILON)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The mean loss of token ids [N, S]."""
        hidden = self.words(ids) + self.positions(torch.arange(ids.shape[1]))
        hidden = self.norm(self.body(hidden))
        logits = nn.functional.linear(hidden, self.words.weight)
        labels = nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]
        return nn.functional.cross_entropy(logits.view(-1, VOCABULARY), labels.reshape(-1))


def plain_body() -> nn.Sequential:
    """The layers, whole."""
    return nn.Sequential(*(Block() for _ in range(NUM_LAYERS)))


def by_head(tensor: torch.Tensor) -> torch.Tensor:
    """Rows of queries, keys and values in the order of heads: [3 * WIDTH, ...] from queries, keys, values."""
    return tensor.view(3, HEADS, HEAD_SIZE, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)


def outer_state(weights: State) -> dict[str, torch.Tensor]:
    """What lies around the body, from the names of ``transformers``."""
    return {
        "words.weight": weights["wte.weight"],
        "positions.weight": weights["wpe.weight"],
        "norm.weight": weights["ln_f.weight"],
        "norm.bias": weights["ln_f.bias"],
    }


def plain_state(weights: State) -> dict[str, torch.Tensor]:
    """Weights, or their gradients, by the names of the plain model."""
    state = outer_state(weights)
    for layer in range(NUM_LAYERS):
        for here, there in (
            ("norm1", "ln_1"),
            ("attention.qkv", "attn.c_attn"),
            ("attention.proj", "attn.c_proj"),
            ("norm2", "ln_2"),
            ("mlp.dense1", "mlp.c_fc"),
            ("mlp.dense2", "mlp.c_proj"),
        ):
            weight, bias = (weights[f"h.{layer}.{there}.{kind}"] for kind in ("weight", "bias"))
            if weight.dim() == 2:  # a Conv1D, with its weight the other way round
                weight = weight.t()
            if here == "attention.qkv":
                weight, bias = by_head(weight), by_head(bias)
            state[f"body.{layer}.{here}.weight"], state[f"body.{layer}.{here}.bias"] = weight, bias
    return state


def our_state(weights: State) -> dict[str, torch.Tensor]:
    """Weights, or their gradients, by the names of a model whose body is a ``DistributedTransformer``."""
    state = outer_state(weights)
    for layer in range(NUM_LAYERS):
        for here, there in (
            ("attention.pre_layernorm", "ln_1"),
            ("attention.query_key_value", "attn.c_attn"),
            ("attention.dense", "attn.c_proj"),
            ("output.pre_layernorm", "ln_2"),
            ("output.dense1", "mlp.c_fc"),
            ("output.dense2", "mlp.c_proj"),
        ):
            for kind in ("weight", "bias"):
                found = weights[f"h.{layer}.{there}.{kind}"]
                state[f"body.transformer.seq_layers.{layer}.{here}.{kind}"] = found.t() if found.dim() == 2 else found
    return state
