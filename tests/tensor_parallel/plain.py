"""Transformer layers in plain torch, whole, with the weights' names of the distributed ones."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

FUNCTIONS = {
    "gelu": nn.functional.gelu,
    "gelu_new": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": torch.relu,
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
}


def norm(options: dict[str, Any], wanted: bool, size: int) -> nn.Module | None:
    if not wanted:
        return None
    kind = nn.RMSNorm if options.get("normalization") == "rms_norm" else nn.LayerNorm
    return kind(size, eps=options["layernorm_epsilon"])


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Each pair of channels turned by its angle."""
    width = cos.shape[-1]
    pairs = torch.arange(width).view(-1, 2) if interleaved else torch.arange(width).view(2, -1).T
    first, second = pairs.unbind(1)
    cos, sin = cos[:, None], sin[:, None]
    result = x.clone()
    result[..., first] = x[..., first] * cos[..., first] - x[..., second] * sin[..., first]
    result[..., second] = x[..., second] * cos[..., second] + x[..., first] * sin[..., second]
    return result


class PlainAttention(nn.Module):
    def __init__(self, cross: bool = False, **options: Any) -> None:
        super().__init__()
        self.options, self.cross = options, cross
        hidden, size = options["hidden_size"], options["attention_head_size"]
        self.heads = options["num_attention_heads"]
        self.pairs = options.get("num_key_value_heads") or self.heads
        shared = options.get("shared_layernorm", False)
        self.pre_layernorm = norm(options, options["pre_layernorm"] and not shared, hidden)
        bias = options.get("query_key_value_bias", True)
        if cross:
            self.query = nn.Linear(hidden, self.heads * size, bias)
            self.key_value = nn.Linear(hidden, 2 * self.pairs * size, bias)
        else:
            self.query_key_value = nn.Linear(hidden, (self.heads + 2 * self.pairs) * size, bias)
        self.dense = nn.Linear(self.heads * size, hidden, options.get("dense_bias", True))
        if options.get("query_key_norm"):
            self.query_norm = nn.RMSNorm(size, eps=options["layernorm_epsilon"])
            self.key_norm = nn.RMSNorm(size, eps=options["layernorm_epsilon"])
        self.layernorm = norm(options, options["post_layernorm"], hidden)

    def forward(self, hidden, cross_states=None, mask=None, position_bias=None, cos=None, sin=None):
        options, size = self.options, self.options["attention_head_size"]
        x = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
        wide = [self.heads * size, self.pairs * size, self.pairs * size]
        if self.cross:
            query, (key, value) = self.query(x), self.key_value(cross_states).split(wide[1:], -1)
        else:
            query, key, value = self.query_key_value(x).split(wide, -1)
        query, key, value = (one.unflatten(-1, (-1, size)).transpose(1, 2) for one in (query, key, value))
        if options.get("query_key_norm"):
            query, key = self.query_norm(query), self.key_norm(key)
        if cos is not None:
            query, key = (turned(one, cos, sin, options.get("rotary_interleaved", False)) for one in (query, key))
        shares = self.heads // self.pairs
        key, value = (one[:, [head // shares for head in range(self.heads)]] for one in (key, value))
        scale = options.get("scale") or 1 / math.sqrt(size)
        scores = query @ key.transpose(2, 3) * scale
        for one in (mask, position_bias):
            scores = scores if one is None else scores + one
        back = torch.arange(scores.shape[2])[:, None] - torch.arange(scores.shape[3])
        if options.get("use_alibi"):
            assert self.heads in (4, 8)
            step = 2 ** (-options.get("alibi_bias_max", 8) / self.heads)
            slopes = torch.tensor([step**i for i in range(1, self.heads + 1)], dtype=torch.float64)
            scores = scores - slopes[:, None, None] * back.abs()
        if not self.cross and options.get("causal_mask_size"):
            scores = scores.masked_fill(back < 0, -math.inf)
        if not self.cross and options.get("window_size"):
            scores = scores.masked_fill(back.abs() >= options["window_size"], -math.inf)
        output = self.dense((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
        if options.get("parallel_residual"):
            return output
        return hidden + output if self.layernorm is None else self.layernorm(hidden + output)


class PlainOutput(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        hidden, between, bias = options["hidden_size"], options["intermediate_size"], options.get("mlp_bias", True)
        shared = options.get("shared_layernorm", False)
        self.pre_layernorm = norm(options, options["pre_layernorm"] and not shared, hidden)
        self.dense1 = nn.Linear(hidden, between, bias)
        self.gate = nn.Linear(hidden, between, bias) if options.get("gated") else None
        self.dense2 = nn.Linear(between, hidden, bias)
        self.layernorm = norm(options, options["post_layernorm"], hidden)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        x = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
        function = FUNCTIONS[self.options.get("activation", "gelu")]
        x = function(self.dense1(x)) if self.gate is None else function(self.gate(x)) * self.dense1(x)
        if self.options.get("parallel_residual"):
            return self.dense2(x)
        x = hidden + self.dense2(x)
        return x if self.layernorm is None else self.layernorm(x)


class PlainLayer(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.attention = PlainAttention(**options)
        self.cross_attention = PlainAttention(True, **options) if options.get("add_cross_attention") else None
        self.output = PlainOutput(**options)
        self.pre_layernorm = norm(options, options.get("shared_layernorm", False), options["hidden_size"])

    def forward(
        self, hidden, cross_states=None, mask=None, cross_mask=None, position_bias=None, cos=None, sin=None
    ) -> torch.Tensor:
        given = {"mask": mask, "position_bias": position_bias, "cos": cos, "sin": sin}
        if self.options.get("parallel_residual"):
            x = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
            return hidden + self.attention(x, **given) + self.output(x)
        hidden = self.attention(hidden, **given)
        if self.cross_attention is not None:
            hidden = self.cross_attention(hidden, cross_states, cross_mask)
        return self.output(hidden)


class PlainTransformer(nn.Module):
    def __init__(self, num_layers: int, **options: Any) -> None:
        super().__init__()
        both = options["pre_layernorm"] and options["post_layernorm"]
        windows = options.pop("window_sizes", None) or [None] * num_layers
        self.pre_layernorm = norm(options, both, options["hidden_size"])
        self.layernorm = norm(options, options.get("final_layernorm", both), options["hidden_size"])
        self.seq_layers = nn.ModuleList(PlainLayer(**options, window_size=window) for window in windows)

    def forward(self, hidden: torch.Tensor, **given: torch.Tensor) -> torch.Tensor:
        hidden = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
        for layer in self.seq_layers:
            hidden = layer(hidden, **given)
        return hidden if self.layernorm is None else self.layernorm(hidden)


class PlainLanguageModel(nn.Module):
    def __init__(
        self,
        vocab_size: int,
        num_positions: int,
        num_layers: int = 2,
        num_token_types: int = 0,
        add_lm_head: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        hidden = options["hidden_size"]
        self.causal = "causal_mask_size" in options
        self.word_embedding = nn.Embedding(vocab_size, hidden)
        self.position_embedding = nn.Embedding(num_positions, hidden)
        self.token_type_embedding = nn.Embedding(num_token_types, hidden) if num_token_types else None
        self.transformer = PlainTransformer(num_layers, **options)
        self.lm_head = nn.Linear(hidden, vocab_size, bias=False) if add_lm_head else None
        if self.lm_head is not None:
            self.lm_head.weight = self.word_embedding.weight

    def forward(
        self, input_ids, attention_mask=None, token_type_ids=None, position_ids=None, cross_states=None, cross_mask=None
    ) -> torch.Tensor:
        hidden = self.word_embedding(input_ids)
        positions = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        hidden = hidden + self.position_embedding(positions)
        if self.token_type_embedding is not None:
            types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
            hidden = hidden + self.token_type_embedding(types)
        given = {} if cross_states is None else {"cross_states": cross_states}
        for name, mask in (("mask", attention_mask), ("cross_mask", cross_mask)):
            if mask is not None:
                given[name] = mask.double()[:, None, None] * -1e4
        hidden = self.transformer(hidden, **given)
        return hidden if self.lm_head is None else self.lm_head(hidden)
