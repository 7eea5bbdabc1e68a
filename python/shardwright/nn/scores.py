"""Attention of this rank's heads: scores, their summands, and rotary embeddings."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from types import MethodType

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.attention import SDPBackend

from shardwright.errors import ConfigError
from shardwright.nn.dropout import random_numbers


@dataclass(frozen=True)
class Added:
    """The summands of scores, added before the softmax.

    Attributes:
        terms: Tensors, each [N or 1, heads or 1, Q or 1, K], floating.
        causal: Whether a query attends only to keys up to its own position.
        window: The number of keys that a query attends to, including its own; None for all.
        slopes: The slopes of ALiBi, [heads]: scores decrease with the distance between query and key. None without it.
    """

    terms: tuple[torch.Tensor, ...] = ()
    causal: bool = False
    window: int | None = None
    slopes: torch.Tensor | None = None

    def summed(self, query: torch.Tensor, num_keys: int) -> torch.Tensor | None:
        """Return the sum as one tensor of the query's dtype; None if there is only a causal mask or nothing."""
        parts = [_cast(term, query.dtype) for term in self.terms]
        if not parts and self.slopes is None and self.window is None:
            return None
        at = torch.arange(query.shape[-2], device=query.device).unsqueeze(1)
        back = at - torch.arange(num_keys, device=query.device)  # distance of a key before the query
        if self.slopes is not None:
            slopes = self.slopes.to(query.device, torch.promote_types(query.dtype, torch.float32)).view(-1, 1, 1)
            parts.append((-slopes * back.abs()).to(query.dtype).unsqueeze(0))
        if self.window is not None or self.causal:
            hidden = back < 0 if self.causal else torch.zeros_like(back, dtype=torch.bool)
            if self.window is not None:
                hidden = hidden | (back >= self.window) | (back <= -self.window)
            parts.append(
                torch.zeros_like(back, dtype=query.dtype).masked_fill(hidden, -math.inf).view(1, 1, *back.shape)
            )
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    added: Added,
    scale: float,
    dropout: tuple[float, int] | None = None,
    recomputed_for: nn.Module | None = None,
) -> torch.Tensor:
    """Weight the values by the softmax of the scores, with torch's kernels.

    Args:
        query: [N, heads, Q, head_size].
        key: [N, key and value heads, K, head_size]; heads are a multiple of these, and consecutive heads share one.
        value: Of the same shape as the key.
        added: The summands of the scores.
        scale: The factor of the scores.
        dropout: The dropout probability of attention weights, and the seed; None for no dropout.
        recomputed_for: The module for whose backward the scores are computed again instead of being kept; None keeps
            them. Fused kernels never keep them.

    Returns:
        [N, heads, Q, head_size].
    """
    bias = added.summed(query, key.shape[-2])
    shares = query.shape[1] // key.shape[1]
    if shares > 1 and bias is not None:  # memory-efficient kernels accept a bias or shared heads, not both
        key, value = key.repeat_interleave(shares, 1), value.repeat_interleave(shares, 1)
    if bias is not None and not query.numel():  # torch 2.15 gives a bias no gradient here
        return (query @ key.transpose(-1, -2) + bias).softmax(-1) @ value
    probability, seed = (0.0, 0) if dropout is None else dropout
    is_causal, enable_gqa = added.causal and bias is None, shares > 1 and bias is None

    def run(
        _: object, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        with random_numbers(seed, query.device) if probability else nullcontext():
            return nn.functional.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=bias,
                dropout_p=probability,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )

    given = (query, key, value) if bias is None else (query, key, value, bias)
    if recomputed_for is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return run(None, *given)
    kernel = torch._fused_sdp_choice(
        query, key, value, bias, probability, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    if kernel != SDPBackend.MATH.value:
        return run(None, *given)
    run.isolated = True  # type: ignore[attr-defined]  # it changes nothing that a module keeps
    result: torch.Tensor = torch.utils.checkpoint.checkpoint(
        MethodType(run, recomputed_for), *given, use_reentrant=False, preserve_rng_state=False
    )
    return result


def attention_scale(
    head_size: int, scale: float | None, scale_attention_scores: bool, by_layer_idx: bool, layer_idx: int | None
) -> float:
    """Return the factor of the scores: the given scale, or one from the head size and the layer's index."""
    if scale is not None:
        return scale
    if by_layer_idx and layer_idx is None:
        raise ConfigError("scale_attn_by_layer_idx is True and layer_idx is None; expected the layer's index, from 0")
    size = 1 / math.sqrt(head_size) if scale_attention_scores else 1.0
    return size / ((layer_idx or 0) + 1) if by_layer_idx else size


def alibi_slopes(heads: int, bias_max: float) -> torch.Tensor:
    """Return the slopes of ALiBi: a geometric sequence from 2 ** (-bias_max / n) to 2 ** -bias_max, n a power of two.

    If the number of heads is not a power of two, n is the next power of two, and every second slope comes first.
    """
    power = 1 << (heads - 1).bit_length()
    slopes = torch.exp2(-bias_max / power * torch.arange(1, power + 1, dtype=torch.float64))
    return slopes if power == heads else torch.cat([slopes[1::2], slopes[::2]])[:heads]


def rotate(input: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Apply rotary embeddings to the first channels of each head of [N, heads, S, head_size].

    Args:
        cos: [N or 1, S, rotary_dim], each angle twice: side by side if interleaved, otherwise in both halves.
        sin: The sines, of the same shape.
        interleaved: Whether channels that are rotated together are adjacent, otherwise half of rotary_dim apart.
    """
    rotary_dim = cos.shape[-1]
    turned, rest = torch.split(input, [rotary_dim, input.shape[-1] - rotary_dim], -1)
    if interleaved:
        across = torch.stack([-turned[..., 1::2], turned[..., ::2]], -1).flatten(-2)
    else:
        first, second = turned.chunk(2, -1)
        across = torch.cat([-second, first], -1)
    turned = (turned * cos.unsqueeze(1) + across * sin.unsqueeze(1)).to(input.dtype)
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned


def _cast(term: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # The smallest number of a wider dtype stays finite, so that a row that is masked entirely has a result.
    if term.dtype == dtype:
        return term
    return term.clamp(min=torch.finfo(dtype).min).to(dtype)
