"""T5: ``T5Block`` is a transformer layer, the first of a stack with the biases of relative positions for all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwright.errors import ConfigError
from shardwright.nn.huggingface.layer import ANY_LENGTH, PRE_NORM, Replaced, TransformersLayer, activation, added_mask
from shardwright.nn.huggingface.weights import Table, Weight, linear

#: Takes distances [Q, K] from query to key, and returns their rows in the table of biases.
Buckets = Callable[[torch.Tensor], torch.Tensor]


class T5Layer(TransformersLayer):
    """A transformer layer that is called as those of T5 are.

    Attributes:
        relative_attention_bias: [buckets, heads] of the first layer of a stack, which hands the biases on; otherwise
            None. It is whole on each rank and meets the rank's own samples: biases are the same for all samples.
    """

    def __init__(self, *, num_buckets: int = 0, buckets: Buckets | None = None, **options: Any) -> None:
        """Make a layer with fresh weights, and with a table of biases if it has buckets."""
        super().__init__(**options)
        self._buckets = buckets
        self.relative_attention_bias = nn.Embedding(num_buckets, self.num_attention_heads) if num_buckets else None

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        encoder_decoder_position_bias: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Apply the layer; arguments not described here are those of ``TransformersLayer``.

        Args:
            hidden_states: [batch, sequence, hidden_size], no float16.
            position_bias: [1, heads, sequence, sequence]; None for the layer's own, if it has any.
            encoder_decoder_position_bias: [1, heads, sequence, sequence of the encoder], added to scores of
                cross-attention.

        Returns:
            [batch, sequence, hidden_size], and the two biases for the next layer.
        """
        if hidden_states.dtype == torch.float16:
            raise ConfigError(
                f"{type(self).__name__}: hidden_states are float16, which T5 clamps after each block and a distributed "
                "layer does not; use bfloat16 or float32"
            )
        if position_bias is None and self.relative_attention_bias is not None and self._buckets is not None:
            at = torch.arange(hidden_states.shape[1], device=hidden_states.device)
            position_bias = (
                self.relative_attention_bias(self._buckets(at - at.unsqueeze(1))).permute(2, 0, 1).unsqueeze(0)
            )
        if encoder_decoder_position_bias is not None and encoder_hidden_states is not None:
            length = encoder_hidden_states.shape[1]
            encoder_attention_mask = added_mask(encoder_attention_mask, hidden_states, length)
            encoder_attention_mask = encoder_attention_mask + encoder_decoder_position_bias
        result = super().forward(
            hidden_states,
            attention_mask,
            None,
            encoder_hidden_states,
            encoder_attention_mask,
            position_bias=position_bias,
            **others,
        )
        return result, position_bias, encoder_decoder_position_bias


def arguments(module: Any) -> dict[str, Any]:
    """Of a layer of T5's encoder or decoder."""
    attention, dense = module.layer[0].SelfAttention, module.layer[-1].DenseReluDense
    gated = hasattr(dense, "wi_0")
    biases: dict[str, Any] = {}
    if attention.has_relative_attention_bias:
        number = attention.relative_attention_num_buckets
        biases["num_buckets"] = number
        biases["buckets"] = functools.partial(
            attention._relative_position_bucket,
            bidirectional=not attention.is_decoder,
            num_buckets=number,
            max_distance=attention.relative_attention_max_distance,
        )
    return {
        **biases,
        "num_attention_heads": attention.n_heads,
        "attention_head_size": attention.key_value_proj_dim,
        "hidden_size": attention.d_model,
        "intermediate_size": dense.wo.in_features,
        "attention_dropout_prob": attention.dropout,
        "hidden_dropout_prob": module.layer[0].dropout.p,
        "intermediate_dropout_prob": dense.dropout.p,
        "query_key_value_bias": False,
        "dense_bias": False,
        "mlp_bias": False,
        "scale": attention.scaling,
        "activation": activation(dense.act),
        "gated": gated,
        "normalization": "rms_norm",
        "layernorm_epsilon": module.layer[0].layer_norm.variance_epsilon,
        "causal_mask_size": ANY_LENGTH if module.is_decoder else None,
        "add_cross_attention": module.is_decoder,
        **PRE_NORM,
        "layer_idx": attention.layer_idx,
    }


def _output_block(place: int) -> tuple[Weight, ...]:
    """The last block of a layer; a decoder's is one further back."""
    theirs = f"layer.{place}"
    return (
        *linear("output.pre_layernorm", f"{theirs}.layer_norm"),
        *linear("output.dense1", f"{theirs}.DenseReluDense.wi"),
        *linear("output.dense1", f"{theirs}.DenseReluDense.wi_1"),
        *linear("output.gate", f"{theirs}.DenseReluDense.wi_0"),
        *linear("output.dense2", f"{theirs}.DenseReluDense.wo"),
    )


def _attention_block(place: int, name: str, ours: str, *, joined: bool) -> tuple[Weight, ...]:
    theirs = f"layer.{place}.{name}"
    projections = (
        linear(f"{ours}.query_key_value", *(f"{theirs}.{one}" for one in "qkv"))
        if joined
        else (*linear(f"{ours}.query", f"{theirs}.q"), *linear(f"{ours}.key_value", f"{theirs}.k", f"{theirs}.v"))
    )
    return (
        *linear(f"{ours}.pre_layernorm", f"layer.{place}.layer_norm"),
        *projections,
        *linear(f"{ours}.dense", f"{theirs}.o"),
    )


_SELF_ATTENTION = (
    *_attention_block(0, "SelfAttention", "attention", joined=True),
    Weight("relative_attention_bias.weight", ("layer.0.SelfAttention.relative_attention_bias.weight",)),
)
_ENCODER = Table((*_SELF_ATTENTION, *_output_block(1)))
_DECODER = Table(
    (
        *_SELF_ATTENTION,
        *_attention_block(1, "EncDecAttention", "cross_attention", joined=False),
        *_output_block(2),
    )
)

BLOCK = Replaced(
    "transformers.models.t5.modeling_t5",
    "T5Block",
    arguments,
    lambda module: _DECODER if module.is_decoder else _ENCODER,
    T5Layer,
    returns_all=True,
)
