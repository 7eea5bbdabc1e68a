"""The linear layer that is divided over tp ranks, for any layouts of its input and output."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Unpack

import torch
from torch import nn

from shardwright.errors import ConfigError
from shardwright.nn.overlapped_linear import Known, overlapped_products
from shardwright.tensor_parallel.agreement import check_sizes
from shardwright.tensor_parallel.layouts import FEATURES, PARTIAL, SHARED, Layout, relayout
from shardwright.tensor_parallel.module import DistributedModule, Placed
from shardwright.tensor_parallel.sharding import Sharding


class ParallelLinear(DistributedModule):
    """A linear layer between any two layouts.

    If the output is divided over its features and the input is not, tp rank i has the i-th slice of the weight's rows,
    and the rest of the input is gathered. Otherwise it has the i-th slice of the columns: it takes its features of the
    input, and the products are summed over ranks, each of which gets its part in the output's layout.

    Attributes:
        in_features: The number of input features of the whole layer.
        blocks: The sizes of the blocks of output features of the whole layer; each block is divided separately.
        input: The layout of the input.
        output: The layout of the output.
        overlap: Whether collectives overlap with matrix products.
        inside: Whether it is part of another distributed module, which knows the shapes of all ranks.
        bias_is_summand: Whether the bias is added to this rank's products, not to their sum over ranks.
        weight: This rank's part of [out features, in features].
        bias: This rank's part of [out features]; None where it has none.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        blocks: Sequence[int],
        bias: bool,
        *,
        input: Layout,
        output: Layout,
        overlap: bool = False,
        inside: bool = False,
        deviation: float | None = None,
        **place: Unpack[Placed],
    ) -> None:
        """Create a layer with newly initialized weights, those of ``nn.Linear`` if ranks have the same seed.

        Args:
            in_features: See the attributes of the class, as for other arguments not described here.
            bias: Whether the layer has a bias. If products are summed, it is a summand of tp rank 0; inside another
                distributed module, which gets the sum, it is added to the sum and has the layout of the output.
            deviation: The standard deviation of normally distributed weights, with a bias of zero; None for the
                weights of ``nn.Linear``.
            **place: Arguments of ``Placed``: ``group``, ``device``, ``dtype``.
        """
        super().__init__(**place)
        self.in_features, self.blocks = in_features, tuple(blocks)
        self.input, self.output = input, output
        self.overlap, self.inside = overlap and self.tp_group.size > 1, inside
        self._by_rows = output == FEATURES and input != FEATURES
        self.bias_is_summand = self._by_rows or not inside or output == PARTIAL
        bound = 1 / math.sqrt(in_features) if in_features else 0.0

        def draw(weight: torch.Tensor) -> None:
            if deviation is None:
                nn.init.kaiming_uniform_(weight, math.sqrt(5))
            else:
                nn.init.normal_(weight, 0.0, deviation)

        def draw_bias(one: torch.Tensor) -> None:
            nn.init.uniform_(one, -bound, bound) if deviation is None else nn.init.zeros_(one)

        shape = (sum(self.blocks), in_features)
        as_output = Sharding(dim=0, blocks=self.blocks) if output == FEATURES else Sharding()
        as_output.check(f"{type(self).__name__}.bias", shape[:1], self.tp_group.size)
        self.make_parameter("weight", shape, as_output if self._by_rows else Sharding(dim=1), draw)
        self.register_parameter("bias", None)
        if bias:
            sums_alone = self.bias_is_summand and not self._by_rows
            self.make_parameter("bias", shape[:1], Sharding(owner=0) if sums_alone else as_output, draw_bias)

    @property
    def out_features(self) -> int:
        """Of the whole layer."""
        return sum(self.blocks)

    def forward(
        self, input: torch.Tensor, *, sizes: Sequence[int] | None = None, needs_grad: bool | None = None
    ) -> torch.Tensor | list[torch.Tensor]:
        """Apply the layer; all ranks of the group must call it together.

        Args:
            input: Floating or complex, [..., in_features] or this rank's part of that in the input's layout.
            sizes: The size of every tp rank's slice, if the caller knows them, or if an output's are not equal.
            needs_grad: Whether any rank needs a gradient, if the caller knows. With neither this nor
                ``sizes``, the ranks first exchange shapes by one small all-gather.

        Returns:
            [..., out_features] or this rank's part of that in the output's layout; for several blocks, a list of them.

        Raises:
            ConfigError: Shapes or dtypes do not match, a sliced dim is not divisible by the tp degree and no
                sizes are given, or on a GPU collectives overlap with products and CUDA_DEVICE_MAX_CONNECTIONS is not
                1. All ranks raise it.
        """
        known = None if self.inside else self._hear(input, sizes, needs_grad)
        outputs = apply_together([self], input, known)
        return outputs[0] if len(outputs) == 1 else outputs

    def extra_repr(self) -> str:
        """Return the arguments shown in the module's ``repr``."""
        return f"in_features={self.in_features}, out_features={self.out_features}, tp_degree={self.tp_group.size}"

    def own_blocks(self) -> list[int]:
        """The sizes of this rank's parts of the output's blocks."""
        return [size // (self.tp_group.size if self.output == FEATURES else 1) for size in self.blocks]

    def _hear(self, input: torch.Tensor, sizes: Sequence[int] | None, needs_grad: bool | None) -> Known:
        """Return the properties of the call, exchanged between ranks or known by the caller."""
        group, name = self.tp_group, type(self).__name__
        taken, given = self.input.sizes_dim, self.output.sizes_dim
        divided = given if taken is None and sizes is None else None
        if not self._by_rows and self.input != FEATURES:
            divided = -1
        dims = [dim for dim in (taken if given is None else given, -1) if dim is not None]
        agreement = self.agree(
            [input],
            dims=tuple(dims),
            free_dim=taken,
            divided_dim=divided,
            sums=not self._by_rows,
            known=sizes is not None or needs_grad is not None,
        )
        shape, sliced = tuple(input.shape), dims[0] if len(dims) > 1 else None
        features = self.in_features // (group.size if self.input == FEATURES else 1)
        if shape[-1] != features or (sliced == 0 and len(shape) < 2):
            first = "batch, ..." if sliced == 0 else "..."
            raise ConfigError(f"{name}: the input has shape {shape}; expected [{first}, {features}]")
        if sliced is not None and sliced % len(shape) == len(shape) - 1:
            raise ConfigError(f"{name}: sequence_dim {sliced} is the dim of features in shape {shape}")
        if self.overlap and input.is_cuda and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1":
            raise ConfigError(
                f"{name}: CUDA_DEVICE_MAX_CONNECTIONS is {os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS')!r}; "
                "asynchronous=True needs '1' on a GPU, so that a collective starts before the product beside it"
            )
        known: list[int] | None = None if sizes is None else list(sizes)
        if sliced is not None:
            if known is None:
                known = agreement.sizes(sliced) if taken is not None else [shape[sliced] // group.size] * group.size
            rank = None if taken is None else group.rank
            check_sizes(self.operation, known, group.size, sliced, rank, shape[sliced])
        return Known(
            known,
            agreement.needs_grad if needs_grad is None else needs_grad,
            agreement.parameters_need_grad if needs_grad is None else needs_grad,
        )


def apply_together(
    linears: Sequence[ParallelLinear], input: torch.Tensor, known: Known | None = None
) -> list[torch.Tensor]:
    """Apply several layers with the same layouts to one input, with one collective for all of them.

    Inside another distributed module, where the properties of the call are the same on all ranks, they are not given.
    Returns the blocks of all layers, one after another.
    """
    first, group = linears[0], linears[0].tp_group
    if known is None:
        enabled = torch.is_grad_enabled()
        trained = enabled and any(one.requires_grad for linear in linears for one in linear.parameters())
        known = Known(None, enabled and input.requires_grad, trained)
    weights, biases = [one.weight for one in linears], [one.bias for one in linears]
    own = [one.own_blocks() for one in linears]
    if first.overlap:
        return _blocks(overlapped_products(linears, input, known), own)
    needed = SHARED if first._by_rows else FEATURES
    input = relayout(input, first.input, needed, group=group, needs_grad=known.input_needs_grad, sizes=known.sizes)
    if first.bias_is_summand:
        outputs = [nn.functional.linear(input, *of) for of in zip(weights, biases, strict=True)]
    else:
        outputs = [nn.functional.linear(input, weight) for weight in weights]
    blocks = _blocks(outputs, own if first._by_rows else [one.blocks for one in linears])
    if not first._by_rows:
        blocks = relayout(blocks, PARTIAL, first.output, group=group, needs_grad=known.needs_grad, sizes=known.sizes)
    if first.bias_is_summand:
        return blocks
    added = [
        part
        for bias, sizes in zip(biases, own, strict=True)
        for part in ([None] * len(sizes) if bias is None else torch.split(bias, sizes))
    ]
    return [one if bias is None else one + bias for one, bias in zip(blocks, added, strict=True)]


def _blocks(outputs: Sequence[torch.Tensor], sizes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Return the blocks of several outputs; an output of one block is returned itself, so that it may be written to."""
    return [
        block
        for output, of in zip(outputs, sizes, strict=True)
        for block in ([output] if len(of) == 1 else torch.split(output, list(of), -1))
    ]
