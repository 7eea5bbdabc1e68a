"""The products of a parallel linear layer as one autograd function that overlaps them with its collectives."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwright.tensor_parallel.communicators import (
    fused_allgather_for_tp,
    fwd_allreduce_for_tp,
    reduce_scatter_for_tp,
)
from shardwright.tensor_parallel.group import TensorGroup
from shardwright.tensor_parallel.layouts import WHOLE
from shardwright.tensor_parallel.packing import Pending, resized

if TYPE_CHECKING:
    from shardwright.nn.parallel_linear import ParallelLinear


@dataclass(frozen=True)
class Known:
    """Properties of one call of a parallel linear layer, the same on all ranks.

    Attributes:
        sizes: The size of every tp rank's slice; None if all sizes are equal.
        input_needs_grad: Whether the input needs a gradient on any rank.
        parameters_need_grad: Whether a parameter needs a gradient on any rank.
    """

    sizes: list[int] | None
    input_needs_grad: bool
    parameters_need_grad: bool

    @property
    def needs_grad(self) -> bool:
        """Whether the output needs a gradient."""
        return self.input_needs_grad or self.parameters_need_grad


@dataclass(frozen=True)
class Overlap:
    """The collectives of one call.

    Attributes:
        linear: One of the layers, which all have the same layouts.
        known: The properties of the call.
        gather_dim: The dim along which slices of the input are gathered, not negative; None if it is not sliced.
        scatter_dim: The dim along which the sum of products is sliced, not negative; None if it is not sliced.
    """

    linear: ParallelLinear
    known: Known
    gather_dim: int | None
    scatter_dim: int | None

    @property
    def group(self) -> TensorGroup:
        """The tensor-parallel group."""
        return self.linear.tp_group

    @property
    def sizes(self) -> list[int]:
        """The size of every tp rank's slice."""
        return self.known.sizes or []

    def start_gather(self, own: torch.Tensor, dim: int) -> Pending[list[torch.Tensor]]:
        """Start to gather the slices of all ranks; if this is itself differentiated, run it synchronously."""
        if torch.is_grad_enabled():
            whole = fused_allgather_for_tp(own, dim, group=self.group, sizes=self.sizes, needs_grad=True)
            return lambda: [whole]
        return self.group.all_gather([own], [dim], [self.sizes])

    def start_sum(self, gradient: torch.Tensor) -> Pending[list[torch.Tensor]]:
        """Start to sum the input's gradient over ranks, each of which gets all of it or its slice."""
        if torch.is_grad_enabled():
            total = (
                fwd_allreduce_for_tp(gradient, group=self.group, needs_grad=True)
                if self.gather_dim is None
                else reduce_scatter_for_tp(
                    gradient, self.gather_dim, group=self.group, sizes=self.sizes, needs_grad=True
                )
            )
            return lambda: [total]
        if self.gather_dim is None:
            summed = self.group.start_all_reduce(gradient)
            return lambda: [summed()]
        return self.group.reduce_scatter([gradient], [self.gather_dim], [self.sizes])


class OverlappedProducts(torch.autograd.Function):
    """Products of one input with several weights. Of gathered slices, only the rank's own is kept for the backward.

    The forward multiplies the rank's own slice while the others are gathered. The backward gathers them again while it
    computes their gradient, and sums that over ranks while it computes the gradients of weights. It multiplies its own
    slice of the gradient of a sum while it gathers the others.
    """

    @staticmethod
    def forward(
        ctx: Any, overlap: Overlap, _anchor: torch.Tensor | None, input: torch.Tensor, *tensors: Any
    ) -> tuple[torch.Tensor, ...]:
        """Compute the products of [..., in features] with weights, which are followed by as many biases or None.

        The anchor makes all ranks take part in the backward, including those that need no gradient themselves.
        """
        weights, biases = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
        ctx.overlap = overlap
        ctx.save_for_backward(input, *weights)
        summands = biases if overlap.linear.bias_is_summand else [None] * len(biases)
        if overlap.gather_dim is None:
            outputs = [nn.functional.linear(input, *of) for of in zip(weights, summands, strict=True)]
        else:
            outputs, _ = _multiply_while_gathering(overlap, overlap.gather_dim, input, weights, summands)
        number = len(outputs)
        if overlap.scatter_dim is not None:
            outputs = overlap.group.reduce_scatter(outputs, [overlap.scatter_dim] * number, [overlap.sizes] * number)()
        elif overlap.linear.output == WHOLE:
            sums = [overlap.group.start_all_reduce(one) for one in outputs]
            outputs = [one() for one in sums]
        if not overlap.linear.bias_is_summand:
            outputs = [one if bias is None else one.add_(bias) for one, bias in zip(outputs, biases, strict=True)]
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the input, and of those weights and biases of this rank that need one."""
        overlap: Overlap = ctx.overlap
        input, *weights = ctx.saved_tensors
        of_input: torch.Tensor | None = None
        of_products = [*gradients]
        if overlap.scatter_dim is not None:
            (own,), (weight,) = gradients, weights
            if overlap.known.input_needs_grad:
                (of_input,), whole = _multiply_while_gathering(overlap, overlap.scatter_dim, own, [weight.t()], [None])
            else:
                (whole,) = overlap.start_gather(own, overlap.scatter_dim)()
            of_products = [whole]
        gathers = overlap.gather_dim is not None and overlap.known.parameters_need_grad
        gathered = overlap.start_gather(input, overlap.gather_dim or 0) if gathers else None
        if of_input is None and overlap.known.input_needs_grad:
            products = (one.matmul(weight) for one, weight in zip(of_products, weights, strict=True))
            of_input = functools.reduce(torch.add, products)
        summed = None
        if of_input is not None and (overlap.gather_dim is not None or overlap.linear.input == WHOLE):
            summed = overlap.start_sum(of_input)
        if gathered is not None:
            (input,) = gathered()
        number, needed = len(weights), ctx.needs_input_grad[3:]
        of_weights = [_rows(one).t().mm(_rows(input)) if needed[i] else None for i, one in enumerate(of_products)]
        summands = of_products if overlap.linear.bias_is_summand else gradients
        of_biases = [_rows(one).sum(0) if needed[number + i] else None for i, one in enumerate(summands)]
        if summed is not None:
            (of_input,) = summed()
        return None, None, of_input, *of_weights, *of_biases


def overlapped_products(linears: Sequence[ParallelLinear], input: torch.Tensor, known: Known) -> list[torch.Tensor]:
    """Apply :class:`OverlappedProducts` of layers with the same layouts, in autocast's dtype if it is enabled."""
    dims = (linears[0].input.sizes_dim, linears[0].output.sizes_dim)
    overlap = Overlap(linears[0], known, *(None if dim is None else dim % input.dim() for dim in dims))
    weights, biases = [one.weight for one in linears], [one.bias for one in linears]
    tensors: list[torch.Tensor | None] = [input, *weights, *biases]
    kind = input.device.type
    if torch.is_autocast_enabled(kind):  # autocast does not apply in the backward
        dtype = torch.get_autocast_dtype(kind)
        tensors = [one if one is None or one.dtype == torch.float64 else one.to(dtype) for one in tensors]
    anchor, recorded = None, any(one is not None and one.requires_grad for one in tensors)
    if known.needs_grad and torch.is_grad_enabled() and not recorded:
        anchor = torch.empty(0, device=input.device, requires_grad=True)
    outputs: tuple[torch.Tensor, ...] = OverlappedProducts.apply(overlap, anchor, *tensors)  # type: ignore[no-untyped-call]
    return list(outputs)


def _multiply_while_gathering(
    overlap: Overlap,
    dim: int,
    own: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the products of the gathered tensor, computed first for the rank's own slice, and the gathered tensor."""
    gathered = overlap.start_gather(own, dim)
    if torch.is_grad_enabled():
        (whole,) = gathered()
        return [nn.functional.linear(whole, *of) for of in zip(weights, biases, strict=True)], whole
    rank, sizes = overlap.group.rank, overlap.sizes
    before, mine, total = sum(sizes[:rank]), sizes[rank], sum(sizes)
    shape = resized(own.shape, dim, total)[:-1]
    products = [own.new_empty((*shape, weight.shape[0])) for weight in weights]

    def multiply(source: torch.Tensor, first: int, size: int) -> None:
        for product, weight, bias in zip(products, weights, biases, strict=True):
            place = product.narrow(dim, first, size)
            if not place.is_contiguous():
                place.copy_(nn.functional.linear(source, weight, bias))
            elif bias is None:
                torch.mm(_rows(source), weight.t(), out=_rows(place))
            else:
                torch.addmm(bias, _rows(source), weight.t(), out=_rows(place))

    multiply(own, before, mine)
    (whole,) = gathered()
    for first, size in ((0, before), (before + mine, total - before - mine)):
        if size:
            multiply(whole.narrow(dim, first, size), first, size)
    return products, whole


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])
