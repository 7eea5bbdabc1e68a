"""An embedding divided over its rows, and the cross entropy of logits that are divided over the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from shardwright.errors import ConfigError
from shardwright.nn.embedding import check_id_dtype, check_ids, checked_padding_idx, normal_but_padding
from shardwright.tensor_parallel.agreement import Rule, check_sizes
from shardwright.tensor_parallel.group import TensorGroup, current_tensor_group
from shardwright.tensor_parallel.layouts import PARTIAL, SHARED, WHOLE, relayout, samples, slices
from shardwright.tensor_parallel.module import DistributedModule, Placed
from shardwright.tensor_parallel.sharding import Sharding

_LOSS = "vocabulary_parallel_cross_entropy"
_REDUCTIONS = ("mean", "sum", "none")

#: The cross entropy of half precision is computed in single.
_COMPUTED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class VocabularyParallelEmbedding(DistributedModule):
    """An embedding divided over its rows: tp rank i has the i-th slice of the vocabulary.

    An all-gather gives every rank the ids of all samples, each rank looks up those in its rows, with zeros for the
    others, and a reduce-scatter sums the results and gives each rank its own samples. If all ranks have the same
    samples (``prescaled_batch``), one all-reduce replaces both. Unlike with an embedding divided over channels, a
    vocabulary-parallel output layer can share the weight. A vocabulary that is not divisible by the degree ends in
    rows of zeros that no id uses.

    Attributes:
        weight: [num_embeddings / tp degree, rounded up, embedding_dim].
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        initializer_range: float = 0.02,
        inside: bool = False,
        **place: Unpack[Placed],
    ) -> None:
        """Create an embedding with newly initialized weights.

        Args:
            num_embeddings: The number of ids.
            embedding_dim: The number of channels.
            padding_idx: An id whose embedding gets no gradient and is initially zero; negative ones count from the end.
            initializer_range: The standard deviation of newly initialized weights.
            inside: Whether it is part of another distributed module, which has gathered the ids and sums the results; a
                call is then :meth:`partial`.
            **place: Arguments of ``Placed``: ``group``, ``device``, ``dtype``.
        """
        super().__init__(**place)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.inside = inside
        self.padding_idx = checked_padding_idx("VocabularyParallelEmbedding", padding_idx, num_embeddings)
        self.make_parameter(
            "weight",
            (num_embeddings, embedding_dim),
            Sharding(dim=0, size=num_embeddings),
            normal_but_padding(initializer_range, self.padding_idx),
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Look up the ids of this rank's samples; all ranks of the group must call it together.

        Args:
            input: [batch, ...], int32 or int64; the batch may differ between ranks, and be 0. With ``prescaled_batch``
                it is the same on all ranks.

        Returns:
            [batch, ..., embedding_dim].
        """
        if self.inside:
            return self.partial(input)
        group = self.tp_group
        agreement = self.agree([input], free_dim=samples(group).dim)
        check_id_dtype(self.operation, input)
        lies, batches = samples(group), agreement.sizes(0)
        ids = relayout(input, lies, SHARED, group=group, sizes=batches, needs_grad=False)
        needs_grad = agreement.parameters_need_grad
        return relayout(self.partial(ids), PARTIAL, lies, group=group, sizes=batches, needs_grad=needs_grad)

    def partial(self, ids: torch.Tensor) -> torch.Tensor:
        """Return this rank's summand of the embeddings of ids that are the same on all ranks, without communication.

        Args:
            ids: [...], int32 or int64.

        Returns:
            [..., embedding_dim], zeros if another rank has the row. The embeddings are the sum over ranks.
        """
        check_ids("VocabularyParallelEmbedding", ids, self.num_embeddings)
        rows = self.weight.shape[0]
        first = self.tp_group.rank * rows
        own, elsewhere = _own_rows(ids, first, rows, self.num_embeddings)
        padding = self.padding_idx if self.padding_idx is None else self.padding_idx - first
        padding = padding if padding is not None and 0 <= padding < rows else None
        return nn.functional.embedding(own, self.weight, padding).masked_fill(elsewhere.unsqueeze(-1), 0)

    def extra_repr(self) -> str:
        """Return the arguments shown in the module's ``repr``."""
        return f"{self.num_embeddings}, {self.embedding_dim}, tp_degree={self.tp_group.size}"


class TiedOutput(DistributedModule):
    """The output layer of a language model, with the weight of its word embedding and no bias."""

    weight: nn.Parameter

    def __init__(self, embedding: VocabularyParallelEmbedding) -> None:
        """Create an output layer that shares the weight of an embedding."""
        super().__init__(embedding.tp_group)
        self.weight = embedding.weight
        self.shardings["weight"] = embedding.shardings["weight"]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the logits of this rank's slice of the vocabulary, padding included, without communication.

        The hidden states are the same on all ranks; their gradient is this rank's part of a sum over them.
        """
        return nn.functional.linear(hidden, self.weight)


def vocabulary_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    group: TensorGroup | None = None,
    batches: Sequence[int] | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    vocab_size: int | None = None,
    needs_grad: bool | None = None,
) -> torch.Tensor:
    """Compute the cross entropy of logits that are divided over the vocabulary, without gathering them.

    For each target one small all-gather exchanges the ranks' largest logits, sums of exponentials and the target's
    logit.

    Args:
        logits: This rank's slice of the vocabulary, [..., vocabulary / tp degree, rounded up], floating, for the same
            samples on all ranks.
        target: [...], int64, the same on all ranks.
        group: The tensor-parallel group; by default the running job's.
        batches: If the samples are those of several ranks, the batch of each tp rank in the first dim. The result is
            then the loss of this rank's own samples, and the backward is the derivative of the sum of the ranks'
            losses, with an all-gather of the gradients of losses. Otherwise the result is the same on all ranks and
            counts once.
        ignore_index: Targets with this value are ignored.
        reduction: ``"mean"`` over the targets that are not ignored, ``"sum"``, or ``"none"``.
        label_smoothing: The part of the target, from 0 to 1, that is spread over the vocabulary.
        vocab_size: The size of the whole vocabulary, if the last slices end in padding, which is excluded.
        needs_grad: Whether any rank needs a gradient, if the caller knows, and knows that shapes match. Without it,
            the ranks first exchange shapes by one small all-gather.

    Returns:
        A scalar, or [...] with ``"none"`` (its first dim ``batches[tp rank]``); float32 for half precision.

    Raises:
        ConfigError: Shapes or dtypes do not match, on the CPU a target is out of range, or an option has a value
            that is not allowed.
    """
    group = current_tensor_group() if group is None else group
    if reduction not in _REDUCTIONS:
        raise ConfigError(f"{_LOSS}: reduction is {reduction!r}; allowed: {', '.join(map(repr, _REDUCTIONS))}")
    if not 0 <= label_smoothing <= 1:
        raise ConfigError(f"{_LOSS}: label_smoothing is {label_smoothing}; allowed: 0 to 1")
    if needs_grad is None:
        needs_grad = group.agree(Rule(_LOSS), [logits, target]).needs_grad
    vocabulary = _vocabulary(logits, target, group, vocab_size)
    ignored = target == ignore_index
    counted = torch.where(ignored, 0, target)
    check_ids(_LOSS, counted, vocabulary)
    losses: torch.Tensor = _CrossEntropy.apply(logits, counted, ignored, label_smoothing, vocabulary, group)  # type: ignore[no-untyped-call]
    if batches is not None:
        check_sizes(_LOSS, batches, group.size, 0, None, losses.shape[0])
        losses = relayout(losses, WHOLE, slices(0), group=group, needs_grad=needs_grad, sizes=batches)
        ignored = torch.split(ignored, list(batches))[group.rank]
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / (~ignored).sum() if reduction == "mean" else total


def _vocabulary(logits: torch.Tensor, target: torch.Tensor, group: TensorGroup, vocab_size: int | None) -> int:
    """Return the size of the whole vocabulary, after checking that logits and targets match."""
    if not logits.is_floating_point() or target.dtype != torch.int64:
        raise ConfigError(f"{_LOSS}: logits are {logits.dtype} and target {target.dtype}; expected floating and int64")
    if not logits.dim() or logits.shape[:-1] != target.shape or not logits.shape[-1]:
        raise ConfigError(
            f"{_LOSS}: logits have shape {tuple(logits.shape)} and target {tuple(target.shape)}; "
            "needed are [..., vocabulary / tp degree] and [...]"
        )
    columns = logits.shape[-1] * group.size
    vocabulary = columns if vocab_size is None else vocab_size
    if not columns - group.size < vocabulary <= columns:
        raise ConfigError(
            f"{_LOSS}: vocab_size is {vocabulary}; {group.size} slices of {logits.shape[-1]} columns allow "
            f"{columns - group.size + 1} to {columns}"
        )
    return vocabulary


class _CrossEntropy(torch.autograd.Function):
    """Compute the loss of each target; 0 for ignored ones."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        ignored: torch.Tensor,
        smoothing: float,
        vocabulary: int,
        group: TensorGroup,
    ) -> torch.Tensor:
        size = logits.shape[-1]
        own, elsewhere = _own_rows(target, group.rank * size, size, vocabulary)
        ctx.words = min(max(vocabulary - group.rank * size, 0), size)  # the other columns are padding
        wide = logits.to(_COMPUTED_IN.get(logits.dtype, logits.dtype))
        scores = wide[..., : ctx.words]
        largest = scores.amax(-1) if ctx.words else wide.new_full(wide.shape[:-1], -torch.inf)
        # If all logits of a slice are minus infinity, the exponentials are zero, not undefined.
        finite = torch.where(largest == -torch.inf, 0, largest)
        exponentials = (scores - finite.unsqueeze(-1)).exp_().sum(-1)
        picked = wide.gather(-1, own.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0)
        told = [largest, exponentials, picked, *([scores.sum(-1)] if smoothing else [])]
        (parts,) = group.all_gather([torch.stack(told).unsqueeze(0)], [0], [[1] * group.size])()
        top = parts[:, 0].amax(0)
        norm = (parts[:, 1] * (parts[:, 0] - top).exp()).sum(0).log()  # of logits less the largest: no digits lost
        losses = norm + (top - parts[:, 2].sum(0))
        if smoothing:
            losses = (1 - smoothing) * losses + smoothing * (norm + (top - parts[:, 3].sum(0) / vocabulary))
        ctx.save_for_backward(logits, top, norm, own, elsewhere, ignored)
        ctx.smoothing, ctx.vocabulary = smoothing, vocabulary
        return losses.masked_fill(ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
        logits, top, norm, own, elsewhere, ignored = ctx.saved_tensors
        # Probabilities are recomputed: they would take as much memory as the logits, which are kept anyway.
        found = (logits.to(norm.dtype) - top.unsqueeze(-1)).sub_(norm.unsqueeze(-1)).exp_()
        if ctx.smoothing:
            found -= ctx.smoothing / ctx.vocabulary
        hit = found.new_full(own.shape, ctx.smoothing - 1).masked_fill_(elsewhere, 0)
        found.scatter_add_(-1, own.unsqueeze(-1), hit.unsqueeze(-1))
        found *= gradient.masked_fill(ignored, 0).unsqueeze(-1)
        found[..., ctx.words :] = 0
        return found.to(logits.dtype), None, None, None, None, None


def _own_rows(ids: torch.Tensor, first: int, rows: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of ids in this rank's rows, 0 for ids on other ranks, and a mask of those ids.

    Ids that are on no rank remain out of range, so that the lookup that follows fails.
    """
    places = ids - first
    elsewhere = ((places < 0) | (places >= rows)) & (ids >= 0) & (ids < vocabulary)
    return torch.where(elsewhere, 0, places), elsewhere
