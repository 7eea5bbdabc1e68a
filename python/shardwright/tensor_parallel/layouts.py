"""Layouts of activations over tp ranks, and differentiable collectives between layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from shardwright.errors import ConfigError
from shardwright.tensor_parallel.agreement import SUMMED, Rule, check_sizes
from shardwright.tensor_parallel.group import TensorGroup, current_tensor_group

#: A tensor, or a list of tensors for one collective; the result is of the same kind.
T = TypeVar("T", torch.Tensor, list[torch.Tensor])
Sizes = Sequence[int]


@dataclass(frozen=True)
class Layout:
    """The layout of activations over tp ranks.

    Attributes:
        kind: The name of the kind of layout.
        dim: The dim along which each rank has a slice, if it has one.
        even: Whether slices are of equal size.
    """

    kind: str
    dim: int | None = None
    even: bool = True

    @property
    def sizes_dim(self) -> int | None:
        """The dim in which sizes differ between ranks, if there is one."""
        return None if self.even else self.dim

    @property
    def of_gradient(self) -> Layout:
        """The layout of the gradient of such activations."""
        return {SHARED: PARTIAL, PARTIAL: SHARED}.get(self, self)


#: The same on all ranks, as is the gradient; a loss computed from it counts once.
WHOLE = Layout("whole")
#: The same on all ranks, each of which uses it differently; the gradient is a summand on each.
SHARED = Layout("shared")
#: A summand on each rank; the gradient is the same on all.
PARTIAL = Layout("partial")
#: Each rank has a slice of the last dim, of equal size.
FEATURES = Layout("slices", -1)
#: The same for the dim of attention heads.
HEADS = Layout("slices", 1)


def slices(dim: int) -> Layout:
    """Return the layout in which each rank has a slice of any size along a dim, such as its samples."""
    return Layout("slices", dim, even=False)


def samples(group: TensorGroup) -> Layout:
    """Return the layout of a batch outside distributed modules."""
    return WHOLE if group.prescaled_batch else slices(0)


def hidden_states(group: TensorGroup) -> Layout:
    """Return the layout of hidden states inside a transformer."""
    return FEATURES if group.optimize == "memory" else WHOLE


def relayout(
    tensor: T, old: Layout, new: Layout, *, group: TensorGroup, needs_grad: bool, sizes: Sizes | None = None
) -> T:
    """Convert a tensor, or a list of them by one collective, from one layout to another; backward is the inverse.

    ``needs_grad`` is whether any rank needs a gradient; shapes must be known to match. Slices of any size need the
    ``sizes`` of every tp rank.
    """
    if group.size == 1 or old == new:
        return tensor
    own, theirs = (None if one.even else sizes for one in (old, new))
    return move("relayout", tensor, old, new, group, own, theirs, needs_grad)


def move(
    operation: str,
    tensor: T,
    old: Layout,
    new: Layout,
    group: TensorGroup | None,
    old_sizes: Sizes | None,
    new_sizes: Sizes | None,
    needs_grad: bool | None,
) -> T:
    """Convert activations like :func:`relayout`, for callers that may not know the shapes of other ranks.

    Args:
        operation: The name of the operation, for error messages.
        tensor: As for :func:`relayout`, as are the arguments not described here.
        old_sizes: The size of every tp rank's slice in the old layout, if the caller knows them.
        new_sizes: The size of every tp rank's slice in the new layout, if sizes are not equal.
        needs_grad: Whether any rank needs a gradient, if the caller knows. With none of the three, the ranks exchange
            them.
    """
    group = current_tensor_group() if group is None else group
    dims = tuple(one.dim for one in (new, old) if one.dim is not None)
    divided = new.dim if new_sizes is None else None
    rule = Rule(operation, dims, free_dim=old.dim, divided_dim=divided, sums=old == PARTIAL)
    tensors = [tensor] if isinstance(tensor, torch.Tensor) else list(tensor)
    agreement = group.agree(rule, tensors, known=any(told is not None for told in (old_sizes, new_sizes, needs_grad)))
    cut: Sizes
    joined: Sizes
    cuts: list[tuple[int, Sizes]] = []
    joins: list[tuple[int, Sizes]] = []
    for i, one in enumerate(tensors):
        if new.dim is not None:
            cut = [one.shape[new.dim] // group.size] * group.size if new_sizes is None else new_sizes
            check_sizes(operation, cut, group.size, new.dim, None, one.shape[new.dim])
            cuts.append((new.dim % one.dim(), cut))
        if old.dim is not None:
            joined = agreement.sizes(old.dim, i) if old_sizes is None else old_sizes
            check_sizes(operation, joined, group.size, old.dim, group.rank, one.shape[old.dim])
            if new.dim is not None and new.dim % one.dim() == old.dim % one.dim():
                if len({*cut}) > 1 or len({*joined}) > 1:
                    raise ConfigError(
                        f"{operation}: split_dim and merge_dim are both {old.dim % one.dim()}, for slices of one size "
                        f"only; they are {list(cut)} of tensors of {list(joined)}"
                    )
                joined = cut  # the received slices lack what the sender kept
            joins.append((old.dim % one.dim(), joined))
    needed = agreement.needs_grad if needs_grad is None else needs_grad
    anchor = None
    if needed and torch.is_grad_enabled() and not any(one.requires_grad for one in tensors):
        # This rank's loss depends on other ranks' tensors, even if its own need no gradient.
        anchor = torch.empty(0, device=tensors[0].device, requires_grad=True)
    outputs = _run(_Way(group, old, new, cuts, joins), anchor, tensors)
    return outputs[0] if isinstance(tensor, torch.Tensor) else list(outputs)


@dataclass(frozen=True)
class _Way:
    """A collective from one layout to another.

    For each tensor, ``cuts`` has the dim that is sliced and the sizes of slices, if the new layout has slices;
    ``joins`` has the dim along which slices are joined and their sizes, if the old layout has slices.
    """

    group: TensorGroup
    old: Layout
    new: Layout
    cuts: list[tuple[int, Sizes]]
    joins: list[tuple[int, Sizes]]

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the collective, without gradients."""
        group = self.group
        cut_dims, cut_sizes = [dim for dim, _ in self.cuts], [sizes for _, sizes in self.cuts]
        join_dims, join_sizes = [dim for dim, _ in self.joins], [sizes for _, sizes in self.joins]
        match self.old.kind, self.new.kind:
            case "slices", "slices":
                return group.all_to_all(tensors, cut_dims, join_dims, cut_sizes, join_sizes)
            case "slices", _:
                return group.all_gather(tensors, join_dims, join_sizes)()
            case "partial", "slices":
                return group.reduce_scatter(tensors, cut_dims, cut_sizes)()
            case _, "slices":
                cuts = zip(tensors, self.cuts, strict=True)
                return [torch.split(tensor, list(of), dim)[group.rank].clone() for tensor, (dim, of) in cuts]
            case "partial", _:
                return group.all_reduce(tensors)
        return [tensor.view_as(tensor) for tensor in tensors]

    def back(self, chosen: Sequence[int]) -> _Way:
        """Return the collective for the gradients of the chosen tensors."""
        cuts, joins = ([of[i] for i in chosen] if of else [] for of in (self.cuts, self.joins))
        return _Way(self.group, self.new.of_gradient, self.old.of_gradient, joins, cuts)


class _Collective(torch.autograd.Function):
    """One collective over several tensors; backward is another collective."""

    @staticmethod
    def forward(ctx: Any, way: _Way, _anchor: torch.Tensor | None, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = way.run(tensors)
        ctx.way = way
        ctx.differentiable = [i for i, output in enumerate(outputs) if _differentiable(output)]
        ctx.mark_non_differentiable(*(output for output in outputs if not _differentiable(output)))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # All tensors that can have a gradient, even if this rank needs none: another rank may.
        chosen = ctx.differentiable
        found = _run(ctx.way.back(chosen), None, [gradients[i] for i in chosen])
        of = dict(zip(chosen, found, strict=True))
        return None, None, *(of.get(i) for i in range(len(gradients)))


def _run(way: _Way, anchor: torch.Tensor | None, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    result: tuple[torch.Tensor, ...] = _Collective.apply(way, anchor, *tensors)  # type: ignore[no-untyped-call]
    return result


def _differentiable(tensor: torch.Tensor) -> bool:
    # Eight-bit floats can be moved, but their gradients cannot be added.
    return tensor.dtype in SUMMED and (tensor.is_floating_point() or tensor.is_complex())
