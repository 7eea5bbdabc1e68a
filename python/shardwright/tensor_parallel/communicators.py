"""The communication primitives of custom distributed modules, with their gradients (paper, appendix I.6).

Each has the name it has in the paper. Backward is the exact adjoint over the whole group, for a loss that is the sum of
the ranks' losses; ``fwd_allreduce_for_tp`` and ``bwd_allreduce_for_tp`` are a pair for replicated values instead, whose
loss counts once. All ranks of the group call the same primitives in the same order, and all or none run backward
through them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import torch

from shardwright.errors import ConfigError
from shardwright.tensor_parallel.agreement import SUMMED, Agreement, Rule, check_sizes
from shardwright.tensor_parallel.group import TensorGroup, current_tensor_group

#: A tensor, or several that go in one collective: the result is of the same kind.
T = TypeVar("T", torch.Tensor, list[torch.Tensor])
Sizes = Sequence[int]


def fused_allgather_for_tp(
    tensor: T, dim: int, *, group: TensorGroup | None = None, sizes: Sizes | None = None, needs_grad: bool | None = None
) -> T:
    """Concatenate the tensors of all tp ranks; backward is a reduce-scatter (paper, appendix I.6).

    Args:
        tensor: This rank's, [..., n_r, ...] with its own size n_r in ``dim``, of any dtype; or a list, for one
            collective. The dtype and all other sizes are the same on all ranks.
        dim: Along which to concatenate, in the order of tp ranks.
        group: The tensor-parallel group; by default the running job's.
        sizes: n_r of every tp rank, the same for all tensors of a list, where the caller knows them.
        needs_grad: Whether a gradient is needed by any rank, where the caller knows. With neither this nor ``sizes``
            the ranks tell each other shapes first, one small all-gather, and every rank refuses what does not fit.

    Returns:
        [..., sum of n_r, ...], of the same dtype, the same on all ranks.

    Raises:
        ConfigError: ``dim`` is out of range, shapes differ in another dim, dtypes differ, or ``sizes`` are not those
            of the tensor.
    """
    return _over_slices(_Kind.ALL_GATHER, tensor, dim, group, sizes, needs_grad)


def reduce_scatter_for_tp(
    tensor: T, dim: int, *, group: TensorGroup | None = None, sizes: Sizes | None = None, needs_grad: bool | None = None
) -> T:
    """Sum the tensors of all tp ranks and keep one slice of the sum; backward is an all-gather (paper, appendix I.6).

    Args:
        tensor: This rank's, of one shape [..., n, ...] and dtype on all ranks, floating, complex or integer; or a
            list, for one collective.
        dim: Along which the sum is sliced.
        group: The tensor-parallel group; by default the running job's.
        sizes: Of the slice of every tp rank, n together, where they are not of one size.
        needs_grad: As for :func:`fused_allgather_for_tp`.

    Returns:
        This rank's slice, [..., n / tp degree, ...] or [..., sizes[tp rank], ...], of the same dtype. Parts are added
        in the order of tp ranks; half precision in single, rounded once.

    Raises:
        ConfigError: ``dim`` is out of range, n does not divide by the tp degree, shapes or dtypes differ between
            ranks, the dtype has no sum, or ``sizes`` are not those of the tensor.
    """
    return _over_slices(_Kind.REDUCE_SCATTER, tensor, dim, group, sizes, needs_grad)


def scatter_and_merge_for_tp(
    tensor: T,
    split_dim: int,
    merge_dim: int,
    *,
    group: TensorGroup | None = None,
    split_sizes: Sizes | None = None,
    merge_sizes: Sizes | None = None,
    needs_grad: bool | None = None,
) -> T:
    """Send the j-th slice to tp rank j and concatenate what arrives; backward is the way back (paper, appendix I.6).

    Args:
        tensor: This rank's, [..., n, ..., m_r, ...] with n in ``split_dim`` on all ranks and its own m_r in
            ``merge_dim``, of any dtype; or a list, for one collective.
        split_dim: Which is sliced.
        merge_dim: Along which the received slices are concatenated, in the order of tp ranks. It may be the same if
            slices are of one size.
        group: The tensor-parallel group; by default the running job's.
        split_sizes: Of the slice for every tp rank, n together, where they are not of one size.
        merge_sizes: m_r of every tp rank, where the caller knows them.
        needs_grad: As for :func:`fused_allgather_for_tp`; without any of the three the ranks tell each other shapes.

    Returns:
        [..., n / tp degree, ..., sum of m_r, ...], of the same dtype.

    Raises:
        ConfigError: A dim is out of range, n does not divide by the tp degree, shapes or dtypes differ between ranks
            where they must not, or sizes are not those of the tensor.
    """
    group = current_tensor_group() if group is None else group
    rule = Rule(
        "scatter_and_merge_for_tp",
        (split_dim, merge_dim),
        free_dim=merge_dim,
        divided_dim=split_dim if split_sizes is None else None,
    )
    tensors = _listed(tensor)
    known = any(told is not None for told in (split_sizes, merge_sizes, needs_grad))
    agreement = group.agree(rule, tensors, known=known)
    splits = [split_dim % one.dim() for one in tensors]
    merges = [merge_dim % one.dim() for one in tensors]
    sent: list[Sizes] = []
    received: list[Sizes] = []
    for i, one in enumerate(tensors):
        slices: Sizes = _slices(one.shape[split_dim], group) if split_sizes is None else split_sizes
        check_sizes(rule.operation, slices, group.size, split_dim, None, one.shape[split_dim])
        sizes: Sizes = agreement.sizes(merge_dim, i) if merge_sizes is None else merge_sizes
        check_sizes(rule.operation, sizes, group.size, merge_dim, group.rank, one.shape[merge_dim])
        if splits[i] == merges[i]:  # the received slices have lost what the sender kept
            if len({*slices}) > 1 or len({*sizes}) > 1:
                raise ConfigError(
                    f"{rule.operation}: split_dim and merge_dim are both {splits[i]}, for slices of one size only; "
                    f"they are {list(slices)} of tensors of {list(sizes)}"
                )
            sizes = slices
        sent.append(slices)
        received.append(sizes)
    plan = _Plan(_Kind.ALL_TO_ALL, group, splits, sent, merges, received)
    return _apply(plan, tensor, tensors, agreement, needs_grad)


def fwd_allreduce_for_tp(tensor: T, *, group: TensorGroup | None = None, needs_grad: bool | None = None) -> T:
    """Sum the tensors of all tp ranks; backward is the identity (paper, appendix I.6 and figures 11, 12).

    The result is replicated, and what is computed from it counts once: every rank has the same gradient of it, which
    is that of each summand.

    Args:
        tensor: This rank's, of one shape and dtype on all ranks, floating, complex or integer; or a list, for one
            collective for each dtype.
        group: The tensor-parallel group; by default the running job's.
        needs_grad: Whether a gradient is needed by any rank, where the caller knows that and that shapes are the same.
            Without it the ranks tell each other shapes first, one small all-gather.

    Returns:
        The sum, of the same shape and dtype, the same bits on all ranks.

    Raises:
        ConfigError: Shapes or dtypes differ between ranks, or the dtype has no sum.
    """
    return _of_replicated(_Kind.SUM, tensor, group, needs_grad)


def bwd_allreduce_for_tp(tensor: T, *, group: TensorGroup | None = None, needs_grad: bool | None = None) -> T:
    """Return a replicated tensor; backward sums its gradient over tp ranks (paper, appendix I.6 and figures 11, 12).

    Args:
        tensor: The same on all ranks, of any dtype; or a list, for one collective in backward.
        group: The tensor-parallel group; by default the running job's.
        needs_grad: As for :func:`fwd_allreduce_for_tp`.

    Returns:
        A view of the tensor. Each rank computes another part of the model's result from it.

    Raises:
        ConfigError: Shapes or dtypes differ between ranks.
    """
    return _of_replicated(_Kind.IDENTITY, tensor, group, needs_grad)


def gather_replicated_for_tp(
    tensor: T, dim: int, *, group: TensorGroup, needs_grad: bool, sizes: Sizes | None = None
) -> T:
    """Concatenate the tensors of all tp ranks into a replicated one; backward takes this rank's slice.

    For :func:`bwd_allreduce_for_tp`'s kind of value: the result counts once, and every rank has its whole gradient, of
    which a sum over ranks would be a multiple.

    Args:
        tensor: This rank's, of shape [..., n_r, ...]; or a list, for one collective.
        dim: Along which to concatenate.
        group: The tensor-parallel group.
        needs_grad: Whether a gradient is needed by any rank. Shapes are known to fit together.
        sizes: n_r of every tp rank; by default all of one size.

    Returns:
        [..., sum of n_r, ...], the same on all ranks.

    Raises:
        ConfigError: ``sizes`` are not those of the tensor.
    """
    return _over_slices(_Kind.GATHER_REPLICATED, tensor, dim, group, sizes, needs_grad)


def slice_replicated_for_tp(
    tensor: T, dim: int, *, group: TensorGroup, needs_grad: bool, sizes: Sizes | None = None
) -> T:
    """Keep this rank's slice of a replicated tensor; backward is an all-gather.

    The adjoint of :func:`gather_replicated_for_tp`: it sends nothing, and every rank gets the whole gradient of the
    replicated tensor from those of the slices.

    Args:
        tensor: The same on all ranks, [..., n, ...]; or a list, for one collective in backward.
        dim: Along which it is sliced.
        group: The tensor-parallel group.
        needs_grad: Whether a gradient is needed by any rank. Shapes are known to fit together.
        sizes: Of the slice of every tp rank, n together; by default all of one size.

    Returns:
        [..., n / tp degree, ...] or [..., sizes[tp rank], ...], in memory of its own.

    Raises:
        ConfigError: n does not divide by the tp degree, or ``sizes`` are not those of the tensor.
    """
    return _over_slices(_Kind.SLICE_REPLICATED, tensor, dim, group, sizes, needs_grad)


class _Kind(Enum):
    """By the name of the primitive."""

    ALL_GATHER = "fused_allgather_for_tp"
    REDUCE_SCATTER = "reduce_scatter_for_tp"
    ALL_TO_ALL = "scatter_and_merge_for_tp"
    SUM = "fwd_allreduce_for_tp"
    IDENTITY = "bwd_allreduce_for_tp"
    GATHER_REPLICATED = "gather_replicated_for_tp"
    SLICE_REPLICATED = "slice_replicated_for_tp"


_ADJOINTS = {
    _Kind.ALL_GATHER: _Kind.REDUCE_SCATTER,
    _Kind.REDUCE_SCATTER: _Kind.ALL_GATHER,
    _Kind.ALL_TO_ALL: _Kind.ALL_TO_ALL,
    _Kind.SUM: _Kind.IDENTITY,
    _Kind.IDENTITY: _Kind.SUM,
    _Kind.GATHER_REPLICATED: _Kind.SLICE_REPLICATED,
    _Kind.SLICE_REPLICATED: _Kind.GATHER_REPLICATED,
}


@dataclass(frozen=True)
class _Plan:
    """A collective, and what it does with each of its tensors; only an all-to-all has dims to merge."""

    kind: _Kind
    group: TensorGroup
    split_dims: Sequence[int] = ()
    split_sizes: Sequence[Sizes] = ()
    merge_dims: Sequence[int] = ()
    merge_sizes: Sequence[Sizes] = ()

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Communicate, without gradients."""
        match self.kind:
            case _Kind.ALL_GATHER | _Kind.GATHER_REPLICATED:
                return self.group.all_gather(tensors, self.split_dims, self.split_sizes)
            case _Kind.REDUCE_SCATTER:
                return self.group.reduce_scatter(tensors, self.split_dims, self.split_sizes)
            case _Kind.ALL_TO_ALL:
                return self.group.all_to_all(
                    tensors, self.split_dims, self.merge_dims, self.split_sizes, self.merge_sizes
                )
            case _Kind.SUM:
                return self.group.all_reduce(tensors)
            case _Kind.IDENTITY:
                return [tensor.view_as(tensor) for tensor in tensors]
            case _Kind.SLICE_REPLICATED:
                slices = zip(tensors, self.split_dims, self.split_sizes, strict=True)
                return [torch.split(tensor, list(of), dim)[self.group.rank].clone() for tensor, dim, of in slices]

    def adjoint(self, chosen: Sequence[int]) -> _Plan:
        """The way back, for some of the tensors."""

        def of(values: Sequence[Any]) -> list[Any]:
            return [values[i] for i in chosen] if values else []

        kind, way_back = _ADJOINTS[self.kind], self.kind is _Kind.ALL_TO_ALL
        split = (of(self.split_dims), of(self.split_sizes))
        merge = (of(self.merge_dims), of(self.merge_sizes))
        return _Plan(kind, self.group, *(merge + split if way_back else split + merge))


class _Collective(torch.autograd.Function):
    """One collective over several tensors; backward is another one."""

    @staticmethod
    def forward(
        ctx: Any, plan: _Plan, _anchor: torch.Tensor | None, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        outputs = plan.run(tensors)
        ctx.plan = plan
        ctx.differentiable = [i for i, output in enumerate(outputs) if _differentiable(output)]
        ctx.mark_non_differentiable(*(output for output in outputs if not _differentiable(output)))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Of all that can have a gradient, whether it is needed on this rank or not: it may be on another one.
        chosen = ctx.differentiable
        found = _run(ctx.plan.adjoint(chosen), None, [gradients[i] for i in chosen])
        of = dict(zip(chosen, found, strict=True))
        return None, None, *(of.get(i) for i in range(len(gradients)))


def _run(plan: _Plan, anchor: torch.Tensor | None, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    result: tuple[torch.Tensor, ...] = _Collective.apply(plan, anchor, *tensors)  # type: ignore[no-untyped-call]
    return result


def _over_slices(
    kind: _Kind, tensor: T, dim: int, group: TensorGroup | None, sizes: Sizes | None, needs_grad: bool | None
) -> T:
    """Gather slices of one dim, or keep one."""
    group = current_tensor_group() if group is None else group
    gathers = kind in (_Kind.ALL_GATHER, _Kind.GATHER_REPLICATED)
    rule = Rule(
        kind.value,
        (dim,),
        free_dim=dim if gathers else None,
        divided_dim=None if gathers or sizes is not None else dim,
        sums=kind is _Kind.REDUCE_SCATTER,
    )
    tensors = _listed(tensor)
    agreement = group.agree(rule, tensors, known=sizes is not None or needs_grad is not None)
    all_sizes = []
    for i, one in enumerate(tensors):
        default = agreement.sizes(dim, i) if gathers else _slices(one.shape[dim], group)
        all_sizes.append(default if sizes is None else sizes)
        check_sizes(kind.value, all_sizes[-1], group.size, dim, group.rank if gathers else None, one.shape[dim])
    plan = _Plan(kind, group, [dim % one.dim() for one in tensors], all_sizes)
    return _apply(plan, tensor, tensors, agreement, needs_grad)


def _of_replicated(kind: _Kind, tensor: T, group: TensorGroup | None, needs_grad: bool | None) -> T:
    """Sum tensors forward, or their gradients backward."""
    group, tensors = current_tensor_group() if group is None else group, _listed(tensor)
    agreement = group.agree(Rule(kind.value, sums=kind is _Kind.SUM), tensors, known=needs_grad is not None)
    return _apply(_Plan(kind, group), tensor, tensors, agreement, needs_grad)


def _listed(tensor: torch.Tensor | list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor] if isinstance(tensor, torch.Tensor) else list(tensor)


def _apply(
    plan: _Plan,
    tensor: T,
    tensors: list[torch.Tensor],
    agreement: Agreement,
    needs_grad: bool | None,
) -> T:
    """Communicate so that this rank takes part in backward if any rank needs it."""
    needed = agreement.needs_grad if needs_grad is None else needs_grad
    anchor = None
    if needed and torch.is_grad_enabled() and not any(one.requires_grad for one in tensors):
        # This rank's loss depends on other ranks' tensors, even where its own are data.
        anchor = torch.empty(0, device=tensors[0].device, requires_grad=True)
    outputs = _run(plan, anchor, tensors)
    return outputs[0] if isinstance(tensor, torch.Tensor) else list(outputs)


def _slices(size: int, group: TensorGroup) -> list[int]:
    return [size // group.size] * group.size


def _differentiable(tensor: torch.Tensor) -> bool:
    # Eight-bit floats are moved, but their gradients could not be added.
    return tensor.dtype in SUMMED and (tensor.is_floating_point() or tensor.is_complex())
