"""Linear layers between replicated and divided activations, with the all-reduce beside or inside their products.

They are Megatron's pair as one function each (paper, appendix F.1): the all-reduce of the input's gradient runs while
the gradients of weights are computed, and sums of products are made in place.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardwright.tensor_parallel.communicators import fwd_allreduce_for_tp
from shardwright.tensor_parallel.group import TensorGroup
from shardwright.tensor_parallel.pending import Pending


def linear_from_replicated(
    group: TensorGroup, input: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """Multiply a replicated input by this rank's rows of weights; its gradient is summed over ranks.

    Args:
        group: The ranks.
        input: [..., in_features], the same on all ranks, and needs a gradient on all or on none.
        weights: Each [this rank's out_features, in_features].
        biases: One for each weight, [this rank's out_features] or None.

    Returns:
        For each weight [..., this rank's out_features].
    """
    tensors = _cast([input, *weights, *biases])
    outputs: tuple[torch.Tensor, ...] = _FromReplicated.apply(group, len(weights), *tensors)  # type: ignore[no-untyped-call]
    return list(outputs)


def linear_to_replicated(
    group: TensorGroup, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Multiply a divided input by this rank's columns of a weight, and sum over ranks.

    Args:
        group: The ranks.
        input: [..., this rank's in_features].
        weight: [out_features, this rank's in_features].
        bias: [out_features], the same on all ranks, or None.

    Returns:
        [..., out_features], the same bits on all ranks; what is computed from it counts once.
    """
    output: torch.Tensor = _ToReplicated.apply(group, *_cast([input, weight, bias]))  # type: ignore[no-untyped-call]
    return output


class _FromReplicated(torch.autograd.Function):
    """Products of one input; backward sums its gradient over ranks."""

    @staticmethod
    def forward(ctx: Any, group: TensorGroup, number: int, input: torch.Tensor, *tensors: Any) -> tuple[Any, ...]:
        weights, biases = tensors[:number], tensors[number:]
        ctx.group = group
        ctx.save_for_backward(input, *weights)
        return tuple(nn.functional.linear(input, *of) for of in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, *weights = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        of_input: torch.Tensor | None = None
        pending: Pending[torch.Tensor] | None = None
        if needed[0]:
            first, *others = (one.matmul(weight) for one, weight in zip(gradients, weights, strict=True))
            of_input = functools.reduce(torch.add, others, first)
            if torch.is_grad_enabled():  # for a second backward
                of_input = fwd_allreduce_for_tp(of_input, group=ctx.group, needs_grad=True)
            else:
                pending = ctx.group.start_all_reduce(of_input)
        number = len(weights)
        of_weights = [_of_weight(one, input) if needed[1 + i] else None for i, one in enumerate(gradients)]
        of_biases = [_rows(one).sum(0) if needed[1 + number + i] else None for i, one in enumerate(gradients)]
        if pending is not None:
            of_input = pending.result()
        return None, None, of_input, *of_weights, *of_biases


class _ToReplicated(torch.autograd.Function):
    """A product that is summed over ranks; backward sends nothing."""

    @staticmethod
    def forward(
        ctx: Any, group: TensorGroup, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        summed = group.start_all_reduce(nn.functional.linear(input, weight)).result()
        return summed if bias is None else summed.add_(bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        _, of_input, of_weight, of_bias = ctx.needs_input_grad
        return (
            None,
            gradient.matmul(weight) if of_input else None,
            _of_weight(gradient, input) if of_weight else None,
            _rows(gradient).sum(0) if of_bias else None,
        )


def _of_weight(gradient: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    return _rows(gradient).t().mm(_rows(input))


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _cast(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """In autocast's dtype, where it is on: it does not reach into a function's backward."""
    first = tensors[0]
    assert first is not None
    kind = first.device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [one if one is None or one.dtype == torch.float64 else one.to(dtype) for one in tensors]
