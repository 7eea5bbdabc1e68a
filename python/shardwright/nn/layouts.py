"""How activations lie over tp ranks, and the way from one layout to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.tensor_parallel.communicators import (
    T,
    bwd_allreduce_for_tp,
    fused_allgather_for_tp,
    fwd_allreduce_for_tp,
    gather_replicated_for_tp,
    reduce_scatter_for_tp,
    scatter_and_merge_for_tp,
    slice_replicated_for_tp,
)
from shardwright.tensor_parallel.group import TensorGroup


@dataclass(frozen=True)
class Layout:
    """How activations lie over tp ranks.

    Attributes:
        kind: Its name.
        dim: Along which each rank has its slice, if it has one.
    """

    kind: str
    dim: int | None = None

    @property
    def sizes_dim(self) -> int | None:
        """The dim in which sizes differ between ranks, if there is one."""
        return self.dim if self.kind == "slices" else None


#: The same on all ranks, and so is the gradient; what is computed from it counts once.
WHOLE = Layout("whole")
#: The same on all ranks, each of which makes another use of it: the gradient is a summand on each.
SHARED = Layout("shared")
#: A summand on each rank; the gradient is the same on all.
PARTIAL = Layout("partial")
#: Each rank has its slice of the last dim, of one size.
FEATURES = Layout("even slices", -1)
#: The same of attention's heads.
HEADS = Layout("even slices", 1)

_WITHOUT_SLICES: dict[Any, Any] = {(WHOLE, SHARED): bwd_allreduce_for_tp, (PARTIAL, WHOLE): fwd_allreduce_for_tp}
_TO_SLICES: dict[Layout, Any] = {WHOLE: slice_replicated_for_tp, PARTIAL: reduce_scatter_for_tp}
_FROM_SLICES: dict[Layout, Any] = {WHOLE: gather_replicated_for_tp, SHARED: fused_allgather_for_tp}


def slices(dim: int) -> Layout:
    """Each rank has its slice along a dim, such as samples of its own or a part of a sequence, of any size."""
    return Layout("slices", dim)


def samples(group: TensorGroup) -> Layout:
    """That of a batch outside distributed modules."""
    return WHOLE if group.prescaled_batch else slices(0)


def hidden_states(group: TensorGroup) -> Layout:
    """That of hidden states inside a transformer."""
    return FEATURES if group.optimize == "memory" else WHOLE


def relayout(
    tensor: T, old: Layout, new: Layout, *, group: TensorGroup, needs_grad: bool, sizes: Sequence[int] | None = None
) -> T:
    """Bring activations from one layout to another; backward is the way back.

    Args:
        tensor: In the old layout; or a list, for one collective.
        old: That one.
        new: The one to be.
        group: The ranks.
        needs_grad: Whether a gradient is needed by any rank. Shapes are known to fit together.
        sizes: Of every tp rank's slice, of slices that may have any size.

    Returns:
        In the new layout.
    """
    if group.size == 1 or old == new:
        return tensor
    first = tensor if isinstance(tensor, torch.Tensor) else tensor[0]
    taken, given = (None if one.dim is None else one.dim % first.dim() for one in (old, new))
    own, theirs = (None if one.sizes_dim is None else sizes for one in (old, new))
    call: dict[str, Any] = {"group": group, "needs_grad": needs_grad}
    found: T
    if taken is None and given is None:
        found = _WITHOUT_SLICES[old, new](tensor, **call)
    elif taken is None:
        found = _TO_SLICES[old](tensor, given, sizes=theirs, **call)
    elif given is None:
        found = _FROM_SLICES[new](tensor, taken, sizes=own, **call)
    else:
        found = scatter_and_merge_for_tp(tensor, given, taken, split_sizes=theirs, merge_sizes=own, **call)
    return found
