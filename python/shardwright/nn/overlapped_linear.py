"""Parallel linear layers whose collectives run beside their products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from shardwright.tensor_parallel.group import TensorGroup
from shardwright.tensor_parallel.packing import resized
from shardwright.tensor_parallel.pending import Pending

LinearGradients = tuple[None, None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True)
class Slices:
    """How a sequence lies over tp ranks, and what backward is for; the same on all ranks.

    Attributes:
        group: The ranks.
        dim: Of the sequence, not negative.
        sizes: Of every tp rank's slice.
        input_needs_grad: Whether the input needs a gradient on any rank.
        parameters_need_grad: Whether a parameter does on any rank.
    """

    group: TensorGroup
    dim: int
    sizes: list[int]
    input_needs_grad: bool
    parameters_need_grad: bool

    def start_gather(self, own: torch.Tensor) -> Pending[list[torch.Tensor]]:
        """Begin to gather the slices of all ranks."""
        return self.group.start_all_gather([own], [self.dim], [self.sizes])

    def start_scatter(self, summand: torch.Tensor) -> Pending[list[torch.Tensor]]:
        """Begin to sum over ranks what each gets its slice of."""
        return self.group.start_reduce_scatter([summand], [self.dim], [self.sizes])


class OverlappedColumn(torch.autograd.Function):
    """A product with a sequence that is gathered meanwhile. Only the own slice is kept for backward.

    Backward gathers the sequence again while it computes the gradient of it, and sums that over ranks while it computes
    the gradient of the weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        slices: Slices,
        _anchor: torch.Tensor | None,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Multiply the slices of all ranks, this one's being [..., n_r, ..., in]: [..., out] of the whole sequence."""
        ctx.slices = slices
        ctx.save_for_backward(input, weight)
        return _multiply_while_gathering(slices, input, weight, bias)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> LinearGradients:
        """From the gradient of the whole sequence that of this rank's slice, summed over ranks, and of parameters."""
        slices: Slices = ctx.slices
        input, weight = ctx.saved_tensors
        gathered = slices.start_gather(input) if slices.parameters_need_grad else None
        of_input, of_weight, of_bias = None, None, None
        scattered = slices.start_scatter(gradient.matmul(weight)) if slices.input_needs_grad else None
        if gathered is not None:
            (whole,) = gathered.result()
            of_weight, of_bias = _of_parameters(ctx, gradient, whole)
        if scattered is not None:
            (of_input,) = scattered.result()
        return None, None, of_input, of_weight, of_bias


class OverlappedRow(torch.autograd.Function):
    """A product that is summed over ranks, each getting its slice of the sequence.

    Backward computes the gradient of the own slice's product while it gathers those of the other slices.
    """

    @staticmethod
    def forward(
        ctx: Any,
        slices: Slices,
        _anchor: torch.Tensor | None,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Multiply this rank's channels of the whole sequence: this rank's slice of the sum, [..., n_r, ..., out]."""
        ctx.slices = slices
        ctx.save_for_backward(input, weight)
        return slices.start_scatter(nn.functional.linear(input, weight, bias)).result()[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> LinearGradients:
        """From the gradient of this rank's slice that of its channels of the whole sequence, and of parameters."""
        slices: Slices = ctx.slices
        input, weight = ctx.saved_tensors
        of_input = None
        if slices.input_needs_grad:
            of_input, whole = _multiply_while_gathering(slices, gradient, weight.t(), None)
        else:
            (whole,) = slices.start_gather(gradient).result()
        return None, None, of_input, *_of_parameters(ctx, whole, input)


def _multiply_while_gathering(
    slices: Slices, own: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The products of the whole sequence, that of the own slice first, and the sequence."""
    gathered = slices.start_gather(own)
    dim, rank, sizes = slices.dim, slices.group.rank, slices.sizes
    before, mine, total = sum(sizes[:rank]), sizes[rank], sum(sizes)
    products = own.new_empty((*resized(own.shape, dim, total)[:-1], weight.shape[0]))

    def multiply(source: torch.Tensor, first: int, size: int) -> None:
        place = products.narrow(dim, first, size)
        if not place.is_contiguous():
            place.copy_(nn.functional.linear(source, weight, bias))
            return
        rows, flat = source.reshape(-1, source.shape[-1]), place.view(-1, place.shape[-1])
        if bias is None:
            torch.mm(rows, weight.t(), out=flat)
        else:
            torch.addmm(bias, rows, weight.t(), out=flat)

    multiply(own, before, mine)
    (whole,) = gathered.result()
    for first, size in ((0, before), (before + mine, total - before - mine)):
        if size:
            multiply(whole.narrow(dim, first, size), first, size)
    return products, whole


def _of_parameters(
    ctx: Any, gradient: torch.Tensor, input: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of weight and bias, where this rank's need one, from whole sequences."""
    rows = gradient.reshape(-1, gradient.shape[-1])
    needed = ctx.needs_input_grad
    of_weight = rows.t().mm(input.reshape(-1, input.shape[-1])) if needed[3] else None
    return of_weight, rows.sum(0) if needed[4] else None
