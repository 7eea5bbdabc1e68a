"""The communication primitives of custom distributed modules, with their gradients (paper, appendix I.6).

Names are those of the paper. The backward is the exact adjoint over the whole group, for a loss that is the sum of
the ranks' losses. ``fwd_allreduce_for_tp`` and ``bwd_allreduce_for_tp`` are a pair for replicated values instead,
whose loss counts once. All ranks of the group, by default the running job's, must call the same primitives in the same
order, and either all or none must run the backward through them.

Each takes a tensor, or a list of tensors for one collective (of sums, for one per dtype). If shapes or dtypes differ
between ranks where they must not, a dim is out of range or cannot be sliced, a dtype has no sum, or sizes do not match
the tensor, it raises :class:`ConfigError`.
"""

from __future__ import annotations

from shardwright.tensor_parallel.group import TensorGroup
from shardwright.tensor_parallel.layouts import PARTIAL, SHARED, WHOLE, Sizes, T, move, slices


def fused_allgather_for_tp(
    tensor: T, dim: int, *, group: TensorGroup | None = None, sizes: Sizes | None = None, needs_grad: bool | None = None
) -> T:
    """Concatenate the tensors of all tp ranks; backward is a reduce-scatter (paper, appendix I.6).

    Args:
        tensor: This rank's tensor, [..., n_r, ...] with its own size n_r in ``dim``, of any dtype.
        dim: The dim along which to concatenate, in the order of tp ranks.
        sizes: n_r of every tp rank, the same for all tensors of a list, if the caller knows them.
        needs_grad: Whether any rank needs a gradient, if the caller knows. With neither this nor ``sizes``, the
            ranks first exchange shapes by one small all-gather, and every rank raises an error if they do not match.

    Returns:
        [..., sum of n_r, ...], of the same dtype, the same on all ranks.
    """
    return move("fused_allgather_for_tp", tensor, slices(dim), SHARED, group, sizes, None, needs_grad)


def reduce_scatter_for_tp(
    tensor: T, dim: int, *, group: TensorGroup | None = None, sizes: Sizes | None = None, needs_grad: bool | None = None
) -> T:
    """Sum the tensors of all tp ranks and keep one slice of the sum; backward is an all-gather (paper, appendix I.6).

    Args:
        tensor: This rank's tensor, of the same shape [..., n, ...] on all ranks, floating, complex or integer.
        dim: The dim along which the sum is sliced.
        sizes: The size of every tp rank's slice, with sum n, if sizes are not equal.
        needs_grad: As for :func:`fused_allgather_for_tp`.

    Returns:
        This rank's slice, [..., n / tp degree, ...] or [..., sizes[tp rank], ...], of the same dtype. Summands are
        added in the order of tp ranks. Half precision is summed in single precision and rounded once.
    """
    return move("reduce_scatter_for_tp", tensor, PARTIAL, slices(dim), group, None, sizes, needs_grad)


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
    """Send the j-th slice to tp rank j and concatenate the slices received; backward is the inverse (appendix I.6).

    Args:
        tensor: This rank's tensor, [..., n, ..., m_r, ...] with n in ``split_dim`` on all ranks and its own m_r in
            ``merge_dim``, of any dtype.
        split_dim: The dim that is sliced.
        merge_dim: The dim along which the received slices are concatenated, in the order of tp ranks. It may be
            ``split_dim`` if slices are of equal size.
        split_sizes: The size of every tp rank's slice, with sum n, if sizes are not equal.
        merge_sizes: m_r of every tp rank, if the caller knows them.
        needs_grad: As for :func:`fused_allgather_for_tp`; with none of the three, the ranks exchange shapes first.

    Returns:
        [..., n / tp degree, ..., sum of m_r, ...], of the same dtype.
    """
    old, new = slices(merge_dim), slices(split_dim)
    return move("scatter_and_merge_for_tp", tensor, old, new, group, merge_sizes, split_sizes, needs_grad)


def fwd_allreduce_for_tp(tensor: T, *, group: TensorGroup | None = None, needs_grad: bool | None = None) -> T:
    """Sum the tensors of all tp ranks; backward is the identity (paper, appendix I.6 and figures 11, 12).

    The result is replicated, and a loss computed from it counts once: its gradient is the same on every rank, and is
    the gradient of each summand.

    Args:
        tensor: This rank's tensor, of the same shape on all ranks, floating, complex or integer.
        needs_grad: Whether any rank needs a gradient, if the caller knows, and knows that shapes are the same. Without
            it, the ranks first exchange shapes by one small all-gather.

    Returns:
        The sum, of the same shape and dtype, bitwise identical on all ranks.
    """
    return move("fwd_allreduce_for_tp", tensor, PARTIAL, WHOLE, group, None, None, needs_grad)


def bwd_allreduce_for_tp(tensor: T, *, group: TensorGroup | None = None, needs_grad: bool | None = None) -> T:
    """Return a replicated tensor; backward sums its gradient over tp ranks (paper, appendix I.6 and figures 11, 12).

    Args:
        tensor: A tensor of any dtype, the same on all ranks.
        needs_grad: As for :func:`fwd_allreduce_for_tp`.

    Returns:
        A view of the tensor, from which each rank computes a different part of the model's result.
    """
    return move("bwd_allreduce_for_tp", tensor, WHOLE, SHARED, group, None, None, needs_grad)
