"""The distributed attention block of a transformer layer (paper, figures 11 and 13)."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import nn

from shardwright.errors import ConfigError
from shardwright.job.runtime import find_runtime
from shardwright.nn.block import Block, BlockOptions
from shardwright.nn.gathered import LayerInputs, enter, tensors_by_name
from shardwright.nn.scores import Added, alibi_slopes, attend, attention_scale, rotate
from shardwright.tensor_parallel.layouts import FEATURES, SHARED, WHOLE, relayout
from shardwright.tensor_parallel.module import DistributedModule, Placed
from shardwright.tensor_parallel.sharding import Sharding

_STREAMS = {False: 0, True: 2}


class AttentionOptions(BlockOptions, total=False):
    """Keyword arguments of attention beyond the paper's.

    Attributes:
        num_key_value_heads: The number of heads of keys and values, each shared by several heads of queries; by default
            the number of heads of queries.
        query_key_value_bias: Whether the linear layers to queries, keys and values have biases, by default True.
        dense_bias: Whether the last linear layer has a bias, by default True.
        query_key_norm: Whether queries and keys are normalized by their root mean square, for each head.
        rotary_interleaved: Whether channels that rotary embeddings rotate together are adjacent.
        scale: The factor of the scores, which replaces the next two options.
        scale_attention_scores: Whether scores are divided by the square root of the head size, by default True.
        scale_attn_by_layer_idx: Whether scores are divided by the layer's index, counted from 1.
        attention_in_fp32: Whether scores, softmax and weighted sum are computed in single precision.
        use_alibi: Whether ALiBi is used: scores decrease with the distance between query and key.
        alibi_bias_max: The negative exponent of the smallest slope of ALiBi, by default 8.
        window_size: The number of positions that a position attends to, including itself; None, the default, for all.
    """

    num_key_value_heads: int | None
    query_key_value_bias: bool
    dense_bias: bool
    query_key_norm: bool
    rotary_interleaved: bool
    scale: float | None
    scale_attention_scores: bool
    scale_attn_by_layer_idx: bool
    attention_in_fp32: bool
    use_alibi: bool
    alibi_bias_max: float
    window_size: int | None


#: Those that blocks do not have.
_OWN = AttentionOptions.__annotations__.keys() - BlockOptions.__annotations__.keys()


class DistributedAttentionLayer(Block):
    """The attention block; each tp rank has the i-th slice of the heads (paper, appendix F).

    Attributes:
        checkpoint_attentions: Whether the backward computes scores again, from the configuration.
        pre_layernorm: The normalization of the input, or None.
        query_key_value: The linear layer to queries, keys and values, concatenated in its output.
        query: The linear layer to queries, for cross-attention.
        key_value: The linear layer from the cross states to keys and values, for cross-attention.
        query_norm: The normalization of each head of queries; its weight, [attention_head_size], is shared by all
            heads.
        key_norm: The normalization of each head of keys.
        dense: The linear layer back to the hidden channels.
        layernorm: The normalization of the sum of input and output, or None.
    """

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        cross_attention: bool = False,
        causal_mask_size: int | None = None,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        *,
        fp32_residual_addition: bool = False,
        **options: Unpack[AttentionOptions],
    ) -> None:
        """Create a block with newly initialized weights. Sizes are those of the whole module.

        Args:
            num_attention_heads: The number of heads of queries.
            attention_head_size: The number of channels of each head.
            hidden_size: The number of channels of input and output.
            attention_dropout_prob: The dropout probability of attention weights, in training.
            hidden_dropout_prob: The dropout probability of the output, in training.
            layernorm_epsilon: The epsilon of the normalizations.
            initializer_range: The standard deviation of normally distributed weights.
            use_normal_initialization: Whether weights are drawn from a normal distribution, with biases of zero.
            cross_attention: Whether keys and values are computed from cross states instead of the input.
            causal_mask_size: The maximum sequence length with causal attention; None for no causal mask.
            pre_layernorm: Whether the input is normalized.
            post_layernorm: Whether the sum of input and output is normalized.
            fp32_residual_addition: Whether the sum is computed in single precision.
            **options: Options of :class:`AttentionOptions`.
        """
        of_block: dict[str, Any] = {name: value for name, value in options.items() if name not in _OWN}
        super().__init__(
            hidden_size,
            hidden_dropout_prob,
            layernorm_epsilon,
            pre_layernorm,
            post_layernorm,
            fp32_residual_addition,
            _STREAMS[cross_attention],
            initializer_range if use_normal_initialization else None,
            **of_block,
        )
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = options.get("num_key_value_heads") or num_attention_heads
        self._check_heads()
        self.attention_head_size = attention_head_size
        self.attention_dropout_prob = self.checked_probability("attention_dropout_prob", attention_dropout_prob)
        self.cross_attention = cross_attention
        self.causal_mask_size = causal_mask_size
        self._keep(options)
        self._make_linears(options.get("query_key_value_bias", True), options.get("dense_bias", True))
        normalizes = options.get("query_key_norm", False)
        self.query_norm, self.key_norm = (
            HeadNorm(attention_head_size, layernorm_epsilon, **self.placed) if normalizes else None for _ in range(2)
        )

    def _keep(self, options: AttentionOptions) -> None:
        """Keep what a call needs of the options."""
        self.window_size = options.get("window_size")
        self.rotary_interleaved = options.get("rotary_interleaved", False)
        self.attention_in_fp32 = options.get("attention_in_fp32", False)
        self.use_alibi, self.alibi_bias_max = options.get("use_alibi", False), options.get("alibi_bias_max", 8)
        if self.window_size is not None and self.window_size < 1:
            raise ConfigError(f"window_size is {self.window_size}; allowed: 1 or more, and None")
        self.scale = attention_scale(
            self.attention_head_size,
            options.get("scale"),
            options.get("scale_attention_scores", True),
            options.get("scale_attn_by_layer_idx", False),
            options.get("layer_idx"),
        )
        runtime = find_runtime()
        self.checkpoint_attentions = runtime is not None and runtime.place.cfg.checkpoint_attentions

    def _check_heads(self) -> None:
        heads, pairs, degree = self.num_attention_heads, self.num_key_value_heads, self.tp_group.size
        for name, number in (("num_attention_heads", heads), ("num_key_value_heads", pairs)):
            if number < 1 or number % degree:
                raise ConfigError(
                    f"{name} is {number}; it has to be positive and divide by the tensor parallelism degree, {degree}"
                )
        if heads % pairs:
            raise ConfigError(f"num_key_value_heads is {pairs}; num_attention_heads, {heads}, has to be a multiple")

    def _make_linears(self, query_key_value_bias: bool, dense_bias: bool) -> None:
        channels, size = self.hidden_size, self.attention_head_size
        of_query, of_key = self.num_attention_heads * size, self.num_key_value_heads * size
        if self.cross_attention:
            self.query = self.make_linear(channels, [of_query], query_key_value_bias, WHOLE, FEATURES)
            # All layers use the cross states; their gradient is summed over ranks once, where they were gathered.
            self.key_value = self.make_linear(channels, [of_key, of_key], query_key_value_bias, SHARED, FEATURES)
        else:
            of_all = [of_query, of_key, of_key]
            self.query_key_value = self.make_linear(channels, of_all, query_key_value_bias, WHOLE, FEATURES)
        self.dense = self.make_linear(of_query, [channels], dense_bias, FEATURES, WHOLE)

    def forward(self, inputs: tuple[object, ...]) -> torch.Tensor:
        """Apply the block; all ranks of the group must call it together.

        Args:
            inputs: (hidden, mask, position_bias, cos, sin), or for cross-attention (hidden, cross_states, mask), with
                the shapes of ``LayerInputs``; inputs after hidden and cross states may be missing or None.
                Inside another distributed module ``LayerInputs`` as a plain tuple.

        Returns:
            [batch, sequence, hidden_size]; inside another distributed module, still gathered.
        """
        if self.inside:
            return self._block(LayerInputs(*inputs))  # type: ignore[arg-type]
        names = ("hidden", "cross_states", "cross_mask") if self.cross_attention else OF_SELF_ATTENTION
        call = enter(
            self,
            named_inputs(type(self).__name__, inputs, names),
            self.hidden_size,
            self.num_attention_heads,
            drops=self.training and self.drops,
        )
        return call.leave(self._block(call.inputs))

    @property
    def drops(self) -> bool:
        """Whether a dropout has a probability above zero."""
        return self.attention_dropout_prob > 0 or self.hidden_dropout_prob > 0

    def _block(self, inputs: LayerInputs) -> torch.Tensor:
        size = self.attention_head_size
        query, key, value = (
            one.view(*one.shape[:2], one.shape[2] // size, size).transpose(1, 2) for one in self._projected(inputs)
        )
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if inputs.cos is not None and inputs.sin is not None and not self.cross_attention:
            query, key = (rotate(one, inputs.cos, inputs.sin, self.rotary_interleaved) for one in (query, key))
        dtype = value.dtype
        if self.attention_in_fp32:
            query, key, value = query.float(), key.float(), value.float()
        seed = self.seed_of(inputs.seed, self.attention_dropout_prob, 0, divided=True)
        dropout = None if seed is None else (self.attention_dropout_prob, seed)
        added = self._added(inputs, query.shape[-2])
        recomputed_for = self if self.checkpoint_attentions else None
        context = attend(query, key, value, added, self.scale, dropout, recomputed_for).to(dtype)
        output = self.dense(context.transpose(1, 2).flatten(2))
        return self.after(inputs.hidden, output, inputs.seed, 1)

    def _projected(self, inputs: LayerInputs) -> list[torch.Tensor]:
        """Return queries, keys and values of this rank's heads, each [N, S or K, channels of these heads]."""
        input = self.before(inputs.hidden)
        if not self.cross_attention:
            projected: list[torch.Tensor] = self.query_key_value(input)
            return projected
        if inputs.cross_states is None:
            raise ConfigError(f"{type(self).__name__}: cross-attention needs cross_states, but they are None")
        return [self.query(input), *self.key_value(inputs.cross_states)]

    def _added(self, inputs: LayerInputs, length: int) -> Added:
        """Return what is added to the scores of this rank's heads."""
        if self.cross_attention:
            return Added(() if inputs.cross_mask is None else (inputs.cross_mask,))
        if self.causal_mask_size is not None and length > self.causal_mask_size:
            raise ConfigError(
                f"{type(self).__name__}: the sequence has length {length}; causal_mask_size allows up to "
                f"{self.causal_mask_size}"
            )
        slopes = None
        if self.use_alibi:
            degree, rank = self.tp_group.size, self.tp_group.rank
            slopes = alibi_slopes(self.num_attention_heads, self.alibi_bias_max).chunk(degree)[rank]
        terms = tuple(one for one in (inputs.mask, inputs.position_bias) if one is not None)
        return Added(terms, self.causal_mask_size is not None, self.window_size, slopes)


class HeadNorm(DistributedModule):
    """Normalization of each head by its root mean square, with one weight, [attention_head_size], for all heads.

    Heads are divided over ranks, but the weight is not: its gradient is summed over ranks.
    """

    weight: nn.Parameter

    def __init__(self, head_size: int, eps: float, **place: Unpack[Placed]) -> None:
        """Create a layer with a weight of one."""
        super().__init__(**place)
        self.eps = eps
        self.make_parameter("weight", (head_size,), Sharding(), nn.init.ones_)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize the last dim."""
        own: torch.Tensor = self.weight
        weight = relayout(own, WHOLE, SHARED, group=self.tp_group, needs_grad=own.requires_grad)
        return nn.functional.rms_norm(input, weight.shape, weight, self.eps)


OF_SELF_ATTENTION = ("hidden", "mask", "position_bias", "cos", "sin")


def named_inputs(module: str, inputs: tuple[object, ...], names: tuple[str, ...]) -> LayerInputs:
    """Convert a caller's tuple of tensors, which begins with hidden states, to inputs of a layer."""
    tensors: dict[str, Any] = tensors_by_name(module, inputs, names)
    return LayerInputs(**tensors)
