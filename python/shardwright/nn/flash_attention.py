"""Attention as a separate layer, over query, key and value in one tensor."""

from __future__ import annotations

import torch
from torch import nn

from shardwright.errors import ConfigError
from shardwright.nn.dropout import draw_seed
from shardwright.nn.scores import Added, alibi_slopes, attend, attention_scale


class FlashAttentionLayer(nn.Module):
    """Attention through torch's ``scaled_dot_product_attention``, whose kernels never store the scores.

    It has no parameters and is not divided: a distributed layer applies it to this rank's heads.
    """

    def __init__(
        self,
        attention_dropout_prob: float = 0.1,
        attention_head_size: int | None = None,
        scale_attention_scores: bool = True,
        scale_attn_by_layer_idx: bool = False,
        layer_idx: int | None = None,
        scale: float | None = None,
        triton_flash_attention: bool = False,
        use_alibi: bool = False,
        *,
        alibi_bias_max: float = 8,
    ) -> None:
        """Create a layer.

        Args:
            attention_dropout_prob: The dropout probability of attention weights, in training.
            attention_head_size: The size of every head; by default that of the input.
            scale_attention_scores: Whether scores are divided by the square root of the head size.
            scale_attn_by_layer_idx: Whether scores are divided by the layer's index, counted from 1.
            layer_idx: The layer's index, from 0.
            scale: The factor of the scores, which replaces the three arguments above.
            triton_flash_attention: Whether the result is that of the Triton kernel, without dropout; it is still
                computed by torch's kernels.
            use_alibi: Whether ALiBi is used: scores decrease with the distance between query and key.
            alibi_bias_max: The negative exponent of the smallest slope of ALiBi.
        """
        super().__init__()
        self.attention_dropout_prob = 0.0 if triton_flash_attention else attention_dropout_prob
        self.attention_head_size = attention_head_size
        self.use_alibi, self.alibi_bias_max = use_alibi, alibi_bias_max
        self._scale = (scale, scale_attention_scores, scale_attn_by_layer_idx, layer_idx)
        attention_scale(1, *self._scale)

    def forward(self, qkv: torch.Tensor, attn_mask: torch.Tensor | None = None, causal: bool = False) -> torch.Tensor:
        """Apply attention.

        Args:
            qkv: [batch, S, 3, heads, head_size]: query, key and value, floating.
            attn_mask: [batch or 1, heads or 1, 1 or S, S], added to the scores, floating.
            causal: Whether a position attends only to positions up to itself.

        Returns:
            [batch, heads, S, head_size], of the same dtype.
        """
        size = self.attention_head_size
        if qkv.dim() != 5 or qkv.shape[2] != 3 or (size is not None and qkv.shape[4] != size):
            raise ConfigError(
                f"FlashAttentionLayer: qkv has shape {tuple(qkv.shape)}; expected "
                f"[batch, sequence, 3, heads, {'head size' if size is None else size}]"
            )
        query, key, value = (one.transpose(1, 2) for one in qkv.unbind(2))
        slopes = alibi_slopes(query.shape[1], self.alibi_bias_max) if self.use_alibi else None
        added = Added(() if attn_mask is None else (attn_mask,), causal, slopes=slopes)
        drops = self.training and self.attention_dropout_prob > 0
        dropout = (self.attention_dropout_prob, draw_seed()) if drops else None
        return attend(query, key, value, added, attention_scale(query.shape[-1], *self._scale), dropout)
