"""The distributed linear layer (paper, section 5.2 and figure 6)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from shardwright.errors import ConfigError
from shardwright.tensor_parallel.agreement import Rule
from shardwright.tensor_parallel.communicators import (
    fwd_allreduce_for_tp,
    reduce_scatter_for_tp,
    scatter_and_merge_for_tp,
    slice_replicated_for_tp,
)
from shardwright.tensor_parallel.group import TensorGroup
from shardwright.tensor_parallel.module import DistributedModule
from shardwright.tensor_parallel.sharding import Sharding


class DividedLinear(DistributedModule):
    """What linear layers have in common that are divided in one way or another.

    Attributes:
        in_features: Of the whole layer.
        out_features: Of the whole layer.
        weight: This rank's part of [out_features, in_features].
        bias: This rank's part of [out_features]; None where it has none.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, group: TensorGroup | None) -> None:
        """Make a layer without parameters."""
        super().__init__(group)
        self.in_features = in_features
        self.out_features = out_features

    def make_parameters(
        self,
        weight: Sharding,
        bias: Sharding | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Make its parameters, those of ``nn.Linear`` for ranks of one seed.

        Args:
            weight: How the weight lies over tp ranks.
            bias: How the bias does; None for a layer without one.
            device: Of the parameters.
            dtype: Of the parameters.

        Raises:
            ConfigError: A size does not divide by the tensor parallelism degree.
        """
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        shape = (self.out_features, self.in_features)
        self.make_parameter("weight", shape, weight, lambda one: nn.init.kaiming_uniform_(one, math.sqrt(5)), **place)
        if bias is None:
            self.register_parameter("bias", None)
        else:
            self.make_parameter("bias", shape[:1], bias, lambda one: nn.init.uniform_(one, -bound, bound), **place)

    def extra_repr(self) -> str:
        """What ``print`` tells of it."""
        return f"in_features={self.in_features}, out_features={self.out_features}, tp_degree={self.tp_group.size}"


class DistributedLinear(DividedLinear):
    """A linear layer divided over its input channels (paper, figure 6).

    Tp rank i holds the i-th slice of the weight's columns; the bias is on tp rank 0. Each rank brings its own samples:
    an all-to-all gives every rank its slice of the features of all samples, it multiplies them, and a reduce-scatter
    sums the products and gives each sample back to where it came from. So the gradient of a weight is complete, the sum
    over all samples of the group. Where all ranks bring the same samples (``prescaled_batch``) each keeps its slice of
    the features, and an all-reduce sums the products; samples count once.

    Attributes:
        weight: [out_features, in_features / tp degree].
        bias: [out_features] on tp rank 0, otherwise None; None everywhere without one.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: TensorGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make a layer with fresh weights, those of ``nn.Linear`` for ranks of one seed.

        Args:
            in_features: Of the whole layer.
            out_features: Of the whole layer.
            bias: Whether it has one.
            group: The ranks that divide it; by default the running job's TP_GROUP.
            device: Of the parameters.
            dtype: Of the parameters.

        Raises:
            ConfigError: ``in_features`` does not divide by the tensor parallelism degree.
        """
        super().__init__(in_features, out_features, group)
        self.make_parameters(Sharding(dim=1), Sharding(owner=0) if bias else None, device, dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply the layer to this rank's samples; all ranks of the group call it together.

        Args:
            input: [batch, ..., in_features], floating or complex; the batch may differ between ranks, and be 0. With
                ``prescaled_batch`` it is the same on all ranks.

        Returns:
            [batch, ..., out_features].

        Raises:
            ConfigError: Shapes or dtypes do not fit together; all ranks raise it.
        """
        group = self.tp_group
        rule = Rule(self.operation, (0, -1), free_dim=None if group.prescaled_batch else 0, divided_dim=-1)
        agreement = group.agree(rule, [input], parameters_need_grad=any(p.requires_grad for p in self.parameters()))
        shape = agreement.signatures[0].shapes[0]
        if len(shape) < 2 or shape[-1] != self.in_features:
            raise ConfigError(
                f"DistributedLinear: the input has shape {tuple(input.shape)}; "
                f"expected [batch, ..., {self.in_features}]"
            )
        needs_grad = agreement.needs_grad or agreement.parameters_need_grad
        if group.prescaled_batch:
            features = slice_replicated_for_tp(input, -1, group=group, needs_grad=agreement.needs_grad)
            products = nn.functional.linear(features, self.weight, self.bias)
            return fwd_allreduce_for_tp(products, group=group, needs_grad=needs_grad)
        batches = agreement.sizes(0)
        features = scatter_and_merge_for_tp(
            input, -1, 0, group=group, merge_sizes=batches, needs_grad=agreement.needs_grad
        )
        products = nn.functional.linear(features, self.weight, self.bias)
        return reduce_scatter_for_tp(products, 0, group=group, sizes=batches, needs_grad=needs_grad)
