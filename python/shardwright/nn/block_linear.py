"""The linear layers of a transformer, divided for speed or for memory (paper, appendix F)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardwright.nn.replicated_linear import linear_from_replicated, linear_to_replicated
from shardwright.tensor_parallel.communicators import reduce_scatter_for_tp
from shardwright.tensor_parallel.group import TensorGroup
from shardwright.tensor_parallel.module import DistributedModule
from shardwright.tensor_parallel.sharding import Sharding


class BlockLinear(DistributedModule):
    """A linear layer inside a transformer layer; its output may be several blocks, such as query, key and value.

    Optimized for speed, one that gives divided channels has a slice of the weight's rows and sends nothing, and one
    that gives whole channels has a slice of the columns, and an all-reduce sums the products (paper, F.1). Optimized
    for memory, every one has a slice of the columns, and a reduce-scatter sums the products and leaves each rank its
    slice of the output's channels (paper, F.2).

    Attributes:
        weight: [sum of blocks / tp degree, in_features] for speed with divided output, otherwise
            [sum of blocks, in_features / tp degree]. Each block is divided for itself.
        bias: [sum of blocks], divided as the output is; None without one.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        blocks: Sequence[int],
        bias: bool = True,
        *,
        divided_output: bool,
        use_normal_initialization: bool = False,
        initializer_range: float = 0.02,
        group: TensorGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make a layer with fresh weights, those of ``nn.Linear`` unless normal ones are asked for.

        Args:
            in_features: Of the whole layer.
            blocks: The sizes of the blocks of output features, of the whole layer.
            bias: Whether it has one.
            divided_output: Whether for speed the output's channels are divided and the input's whole, or the other way
                round. For memory both are divided always.
            use_normal_initialization: Draw weights from a normal distribution, with biases of zero.
            initializer_range: Its standard deviation.
            group: The ranks that divide it; by default the running job's TP_GROUP.
            device: Of the parameters.
            dtype: Of the parameters.

        Raises:
            ConfigError: What is divided does not divide by the tensor parallelism degree.
        """
        super().__init__(group)
        self.in_features, self.blocks = in_features, tuple(blocks)
        self.divided_output = divided_output or self.tp_group.optimize == "memory"
        self.divided_input = not divided_output or self.tp_group.optimize == "memory"
        rows = Sharding(dim=0, blocks=self.blocks) if self.divided_output else Sharding()
        out_features, bound = sum(self.blocks), 1 / math.sqrt(in_features)
        place: dict[str, Any] = {"device": device, "dtype": dtype}

        def draw(weight: torch.Tensor) -> None:
            if use_normal_initialization:
                nn.init.normal_(weight, 0.0, initializer_range)
            else:
                nn.init.kaiming_uniform_(weight, math.sqrt(5))

        def draw_bias(one: torch.Tensor) -> None:
            if use_normal_initialization:
                nn.init.zeros_(one)
            else:
                nn.init.uniform_(one, -bound, bound)

        columns = Sharding(dim=1)
        self.make_parameter(
            "weight", (out_features, in_features), columns if self.divided_input else rows, draw, **place
        )
        if bias:
            self.make_parameter("bias", (out_features,), rows, draw_bias, **place)
        else:
            self.register_parameter("bias", None)
        rows.check(f"{type(self).__name__}.bias", (out_features,), self.tp_group.size)

    def forward(self, input: torch.Tensor, sums_gradient: bool = False) -> list[torch.Tensor]:
        """Apply the layer; all ranks call it together.

        Args:
            input: [..., in_features], or [..., in_features / tp degree] where the input is divided.
            sums_gradient: See :func:`apply_to_one`.

        Returns:
            For each block [..., size], or [..., size / tp degree] where the output is divided.
        """
        return apply_to_one([self], input, sums_gradient)

    def own_blocks(self) -> list[int]:
        """This rank's sizes of the output's blocks."""
        degree = self.tp_group.size if self.divided_output else 1
        return [size // degree for size in self.blocks]

    def extra_repr(self) -> str:
        """What ``print`` tells of it."""
        return f"in_features={self.in_features}, blocks={list(self.blocks)}, tp_degree={self.tp_group.size}"


def apply_to_one(
    linears: Sequence[BlockLinear], input: torch.Tensor, sums_gradient: bool = False
) -> list[torch.Tensor]:
    """Apply several layers of one kind to one input, with one collective.

    Args:
        linears: The layers.
        input: As for :class:`BlockLinear`.
        sums_gradient: Whether the gradient of a replicated input is summed over ranks here, by an all-reduce beside the
            gradients of the weights; otherwise where the input comes from.

    Returns:
        The blocks of all of them, one after another.
    """
    first, group = linears[0], linears[0].tp_group
    if group.size == 1 or not first.divided_input:
        if group.size > 1 and sums_gradient:
            weights, of_linears = [linear.weight for linear in linears], [linear.bias for linear in linears]
            outputs = linear_from_replicated(group, input, weights, of_linears)
        else:
            outputs = [nn.functional.linear(input, linear.weight, linear.bias) for linear in linears]
        return [
            block
            for linear, output in zip(linears, outputs, strict=True)
            for block in torch.split(output, linear.own_blocks(), -1)
        ]
    if not first.divided_output:
        return [
            block
            for linear in linears
            for block in torch.split(
                linear_to_replicated(group, input, linear.weight, linear.bias), list(linear.blocks), -1
            )
        ]
    products = [
        block
        for linear in linears
        for block in torch.split(nn.functional.linear(input, linear.weight), list(linear.blocks), -1)
    ]
    sums = reduce_scatter_for_tp(products, products[0].dim() - 1, group=group, needs_grad=products[0].requires_grad)
    biases = [
        bias
        for linear in linears
        for bias in (
            [None] * len(linear.blocks) if linear.bias is None else torch.split(linear.bias, linear.own_blocks())
        )
    ]
    return [one if bias is None else one + bias for one, bias in zip(sums, biases, strict=True)]
