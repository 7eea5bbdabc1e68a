"""Linear layers divided over output or input channels, for activations that are replicated or sliced along a sequence.

A :class:`ColumnParallelLinear`, what is done element by element, and a :class:`RowParallelLinear` make a block with one
collective before it and one after it (Megatron's split; paper, appendix F.1).
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import nn

from shardwright.errors import ConfigError
from shardwright.nn.linear import DividedLinear
from shardwright.nn.overlapped_linear import OverlappedColumn, OverlappedRow, Slices
from shardwright.tensor_parallel.agreement import Agreement, Rule, Signature, check, check_sizes
from shardwright.tensor_parallel.communicators import (
    bwd_allreduce_for_tp,
    fused_allgather_for_tp,
    fwd_allreduce_for_tp,
    reduce_scatter_for_tp,
)
from shardwright.tensor_parallel.group import TensorGroup
from shardwright.tensor_parallel.sharding import Sharding


class _ParallelLinear(DividedLinear):
    """What both have in common.

    Attributes:
        sequence_dim: Along which activations outside the block are sliced over tp ranks; None where they are
            replicated.
        asynchronous: Whether collectives run beside products.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: TensorGroup | None,
        sequence_dim: int | None,
        asynchronous: bool,
    ) -> None:
        super().__init__(in_features, out_features, group)
        if asynchronous and sequence_dim is None:
            raise ConfigError(
                f"{type(self).__name__}: asynchronous is True and sequence_dim None; only the collectives of a "
                "sequence that is sliced over ranks run beside products, so a sequence_dim is needed"
            )
        self.sequence_dim = sequence_dim
        self.asynchronous = asynchronous

    def _hear(self, rule: Rule, input: torch.Tensor, known: bool, features: int) -> Agreement:
        """What all ranks bring: told by them, or known to be like this rank's."""
        needs_grad = any(one.requires_grad for one in self.parameters())
        if known:
            agreement = Agreement((Signature.of(rule, [input], needs_grad),) * self.tp_group.size)
            check(rule, agreement, self.tp_group.size)
        else:
            agreement = self.tp_group.agree(rule, [input], needs_grad)
        name, dim = type(self).__name__, self.sequence_dim
        if input.shape[-1] != features:
            raise ConfigError(f"{name}: the input has shape {tuple(input.shape)}; expected [..., {features}]")
        if dim is not None and dim % input.dim() == input.dim() - 1:
            raise ConfigError(f"{name}: sequence_dim {dim} is the dim of features in shape {tuple(input.shape)}")
        if self.asynchronous and input.is_cuda and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1":
            raise ConfigError(
                f"{name}: CUDA_DEVICE_MAX_CONNECTIONS is {os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS')!r}; "
                "asynchronous=True needs '1' on a GPU, so that a collective starts before the product beside it"
            )
        return agreement

    def _overlapped(
        self, function: type[OverlappedColumn] | type[OverlappedRow], input: torch.Tensor, slices: Slices
    ) -> torch.Tensor:
        tensors = [input, self.weight, self.bias]
        kind = input.device.type
        if torch.is_autocast_enabled(kind):  # which does not reach into backward
            dtype = torch.get_autocast_dtype(kind)
            tensors = [one if one is None else one.to(dtype) for one in tensors]
        anchor = None
        if torch.is_grad_enabled() and (slices.input_needs_grad or slices.parameters_need_grad):
            # All ranks take part in backward, also one that needs no gradient itself.
            anchor = torch.empty(0, device=input.device, requires_grad=True)
        result: torch.Tensor = function.apply(slices, anchor, *tensors)  # type: ignore[no-untyped-call]
        return result


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer divided over its output channels: tp rank i has the i-th slice of them.

    Without a ``sequence_dim`` the input is the same on all ranks, and the gradient of it is summed over ranks by an
    all-reduce. With one, each rank has its slice of a sequence: an all-gather before, a reduce-scatter of the gradient.

    ``asynchronous=True`` does the same with collectives that run beside products: the own slice is multiplied while the
    others are gathered; backward gathers the sequence again, since only the own slice is kept, while it computes the
    gradient of it, and scatters that while it computes the gradient of the weight.

    Attributes:
        weight: [out_features / tp degree, in_features].
        bias: [out_features / tp degree]; None without one.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        sequence_dim: int | None = None,
        asynchronous: bool = False,
        group: TensorGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make a layer with fresh weights, those of ``nn.Linear`` for ranks of one seed.

        Args:
            in_features: Of the whole layer.
            out_features: Of the whole layer.
            bias: Whether it has one.
            sequence_dim: Along which the input is sliced over tp ranks; None for one that is replicated.
            asynchronous: Whether collectives run beside products.
            group: The ranks that divide it; by default the running job's TP_GROUP.
            device: Of the parameters.
            dtype: Of the parameters.

        Raises:
            ConfigError: ``out_features`` does not divide by the tensor parallelism degree, or ``asynchronous`` is asked
                for without a ``sequence_dim``.
        """
        super().__init__(in_features, out_features, group, sequence_dim, asynchronous)
        self.make_parameters(Sharding(dim=0), Sharding(dim=0) if bias else None, device, dtype)

    def forward(
        self, input: torch.Tensor, *, sizes: Sequence[int] | None = None, needs_grad: bool | None = None
    ) -> torch.Tensor:
        """Apply the layer; all ranks of the group call it together.

        Args:
            input: [..., in_features], the same on all ranks; with a ``sequence_dim`` this rank's slice [..., n_r, ...,
                in_features], of any size there.
            sizes: n_r of every tp rank, where the caller knows them.
            needs_grad: Whether a gradient is needed by any rank, where the caller knows. With neither this nor
                ``sizes`` the ranks tell each other shapes first, one small all-gather.

        Returns:
            [..., out_features / tp degree], of the whole sequence.

        Raises:
            ConfigError: Shapes or dtypes do not fit together, or on a GPU an asynchronous layer finds another
                CUDA_DEVICE_MAX_CONNECTIONS than 1.
        """
        group, dim = self.tp_group, self.sequence_dim
        rule = Rule(self.operation, (-1,) if dim is None else (dim, -1), free_dim=dim)
        agreement = self._hear(rule, input, sizes is not None or needs_grad is not None, self.in_features)
        of_input = agreement.needs_grad if needs_grad is None else needs_grad
        if dim is None:
            replicated = bwd_allreduce_for_tp(input, group=group, needs_grad=of_input)
            return nn.functional.linear(replicated, self.weight, self.bias)
        sizes = agreement.sizes(dim) if sizes is None else list(sizes)
        if not self.asynchronous:
            whole = fused_allgather_for_tp(input, dim, group=group, sizes=sizes, needs_grad=of_input)
            return nn.functional.linear(whole, self.weight, self.bias)
        check_sizes(rule.operation, sizes, group.size, dim, group.rank, input.shape[dim])
        of_parameters = agreement.parameters_need_grad if needs_grad is None else needs_grad
        slices = Slices(group, dim % input.dim(), sizes, of_input, of_parameters)
        return self._overlapped(OverlappedColumn, input, slices)


class RowParallelLinear(_ParallelLinear):
    """A linear layer divided over its input channels: tp rank i has the i-th slice of them, tp rank 0 the bias.

    Without a ``sequence_dim`` the products are summed by an all-reduce, and the result is the same on all ranks. With
    one, a reduce-scatter gives each rank its slice of a sequence, and backward is an all-gather of the gradient.

    With ``asynchronous=True`` backward multiplies the own slice of the gradient while it gathers the others.

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
        sequence_dim: int | None = None,
        asynchronous: bool = False,
        group: TensorGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make a layer with fresh weights, those of ``nn.Linear`` for ranks of one seed.

        Args:
            in_features: Of the whole layer.
            out_features: Of the whole layer.
            bias: Whether it has one.
            sequence_dim: Along which the result is sliced over tp ranks; None for one that is replicated.
            asynchronous: Whether collectives run beside products.
            group: The ranks that divide it; by default the running job's TP_GROUP.
            device: Of the parameters.
            dtype: Of the parameters.

        Raises:
            ConfigError: ``in_features`` does not divide by the tensor parallelism degree, or ``asynchronous`` is asked
                for without a ``sequence_dim``: an all-reduce leaves nothing to compute beside it.
        """
        super().__init__(in_features, out_features, group, sequence_dim, asynchronous)
        self.make_parameters(Sharding(dim=1), Sharding(owner=0) if bias else None, device, dtype)

    def forward(
        self, input: torch.Tensor, *, sizes: Sequence[int] | None = None, needs_grad: bool | None = None
    ) -> torch.Tensor:
        """Apply the layer; all ranks of the group call it together.

        Args:
            input: This rank's channels, [..., in_features / tp degree], of the same samples on all ranks.
            sizes: Of the slice of the sequence of every tp rank, where they are not of one size.
            needs_grad: As for :meth:`ColumnParallelLinear.forward`.

        Returns:
            [..., out_features], the same on all ranks; with a ``sequence_dim`` this rank's slice of it.

        Raises:
            ConfigError: Shapes or dtypes do not fit together, the sequence does not divide by the tp degree and no
                sizes are given, or on a GPU an asynchronous layer finds another CUDA_DEVICE_MAX_CONNECTIONS than 1.
        """
        group, dim = self.tp_group, self.sequence_dim
        divided = dim if sizes is None else None
        rule = Rule(self.operation, (-1,) if dim is None else (dim, -1), divided_dim=divided, sums=True)
        known = sizes is not None or needs_grad is not None
        agreement = self._hear(rule, input, known, self.in_features // group.size)
        of_input = agreement.needs_grad if needs_grad is None else needs_grad
        of_parameters = agreement.parameters_need_grad if needs_grad is None else needs_grad
        if self.asynchronous and dim is not None:
            of = [input.shape[dim] // group.size] * group.size if sizes is None else list(sizes)
            check_sizes(rule.operation, of, group.size, dim, None, input.shape[dim])
            return self._overlapped(OverlappedRow, input, Slices(group, dim % input.dim(), of, of_input, of_parameters))
        products = nn.functional.linear(input, self.weight, self.bias)
        needs_grad = of_input or of_parameters
        if dim is None:
            return fwd_allreduce_for_tp(products, group=group, needs_grad=needs_grad)
        return reduce_scatter_for_tp(products, dim, group=group, sizes=sizes, needs_grad=needs_grad)
