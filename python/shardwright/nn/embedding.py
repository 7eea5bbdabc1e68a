"""The distributed embedding (paper, section 5.3)."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import nn

from shardwright.errors import ConfigError
from shardwright.tensor_parallel.layouts import FEATURES, SHARED, Layout, relayout, samples, slices
from shardwright.tensor_parallel.module import DistributedModule, Initialize, Placed
from shardwright.tensor_parallel.sharding import Sharding

#: Dtypes of ids that torch supports.
_ID_DTYPES = (torch.int32, torch.int64)

#: The value that torch adds to a norm before it divides by it.
_NORM_EPSILON = 1e-7


class DistributedEmbedding(DistributedModule):
    """An embedding divided over its channels (paper, section 5.3).

    Tp rank i holds the i-th slice of the weight's columns. An all-gather gives every rank the ids of all samples, each
    rank looks up its channels of them, and an all-to-all gives each rank all channels of its own samples. If all ranks
    have the same samples (``prescaled_batch``), ids are not gathered, and an all-gather of channels follows the lookup.

    Attributes:
        weight: [num_embeddings, embedding_dim / tp degree].
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: torch.Tensor | None = None,
        initializer_range: float = 0.02,
        _skip_allgather: bool = False,
        _skip_scatter_and_merge: bool = False,
        **place: Unpack[Placed],
    ) -> None:
        """Create an embedding; arguments not described here are those of ``nn.Embedding``.

        Args:
            num_embeddings: The number of ids.
            embedding_dim: The number of channels of the whole embedding.
            padding_idx: An id whose embedding gets no gradient and is initially zero; negative ones count from the end.
            max_norm: The maximum norm, over all channels, to which embeddings are scaled down when they are looked up.
            norm_type: The p of that norm, positive.
            scale_grad_by_freq: Whether gradients are divided by the frequency of an id in the samples of the group.
            sparse: Whether the weight's gradient is sparse.
            _weight: The initial whole weight; None for newly initialized weights.
            initializer_range: The standard deviation of newly initialized weights.
            _skip_allgather: Whether the ids given are already those of the whole group, the same on all ranks.
            _skip_scatter_and_merge: Whether the result is this rank's channels of the samples of the whole group.
            **place: Arguments of ``Placed``: ``group``, ``device``, ``dtype``.
        """
        if _weight is not None:
            place["device"] = place.get("device") or _weight.device
            place["dtype"] = place.get("dtype") or _weight.dtype
        super().__init__(**place)
        shape = (num_embeddings, embedding_dim)
        if _weight is not None and tuple(_weight.shape) != shape:
            raise ConfigError(
                f"DistributedEmbedding: _weight has shape {tuple(_weight.shape)}; expected the whole, {shape}"
            )
        _check_options(norm_type, sparse, scale_grad_by_freq)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = checked_padding_idx("DistributedEmbedding", padding_idx, num_embeddings)
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        self.skips_allgather, self.skips_scatter_and_merge = _skip_allgather, _skip_scatter_and_merge
        initialize = normal_but_padding(initializer_range, self.padding_idx)
        if _weight is not None:
            start = _weight
            initialize = lambda whole: whole.copy_(start)  # noqa: E731
        self.make_parameter("weight", shape, Sharding(dim=1), initialize)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Look up the ids of this rank's samples; all ranks of the group must call it together.

        Args:
            input: [batch, ...], int32 or int64; the batch may differ between ranks, and be 0. With ``prescaled_batch``
                or ``_skip_allgather`` it is the same on all ranks.

        Returns:
            [batch, ..., embedding_dim]. With ``_skip_allgather`` alone, the batch is divided into slices of equal size,
            one for each rank. With ``_skip_scatter_and_merge``, [batch of the group, ..., embedding_dim / tp degree].
        """
        group, name = self.tp_group, self.operation
        gathers = not (self.skips_allgather or group.prescaled_batch)
        scatters = not (self.skips_scatter_and_merge or group.prescaled_batch)
        if not gathers and self.skips_scatter_and_merge:
            return self._look_up(input)
        divided_dim = 0 if scatters and not gathers else None
        agreement = self.agree([input], free_dim=0 if gathers else None, divided_dim=divided_dim)
        check_id_dtype(name, input)
        batches = agreement.sizes(0)
        own = slices(0) if gathers else SHARED
        ids = relayout(input, own, SHARED, group=group, sizes=batches, needs_grad=False)
        channels = self._look_up(ids)
        if self.skips_scatter_and_merge:
            return channels
        back = samples(group) if gathers or not scatters else Layout("slices", 0)
        needs_grad = agreement.parameters_need_grad
        return relayout(channels, FEATURES, back, group=group, sizes=batches, needs_grad=needs_grad)

    def extra_repr(self) -> str:
        """Return the arguments shown in the module's ``repr``."""
        told = f"{self.num_embeddings}, {self.embedding_dim}"
        for name, default in (("padding_idx", None), ("max_norm", None), ("norm_type", 2.0), ("sparse", False)):
            if getattr(self, name) != default:
                told += f", {name}={getattr(self, name)}"
        return f"{told}, tp_degree={self.tp_group.size}"

    def _look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up this rank's channels of ids that are the same on all ranks."""
        check_ids("DistributedEmbedding", ids, self.num_embeddings)
        if self.max_norm is not None:
            self._shrink(ids, self.max_norm)
        return nn.functional.embedding(
            ids, self.weight, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq, sparse=self.sparse
        )

    @torch.no_grad()
    def _shrink(self, ids: torch.Tensor, max_norm: float) -> None:
        """Scale embeddings down to the maximum norm, as torch does before the lookup.

        The p-norm over all channels is the p-norm of the ranks' p-norms, which the ranks exchange.
        """
        rows = torch.unique(ids)
        shards = self.weight.detach()[rows]
        partial = torch.linalg.vector_norm(shards, self.norm_type, dim=1, keepdim=True)
        (parts,) = self.tp_group.all_gather([partial], [1], [[1] * self.tp_group.size])()
        norms = torch.linalg.vector_norm(parts, self.norm_type, dim=1, keepdim=True)
        factors = torch.where(norms > max_norm, max_norm / (norms + _NORM_EPSILON), torch.ones_like(norms))
        self.weight.detach().index_copy_(0, rows.long(), shards * factors)


def _check_options(norm_type: float, sparse: bool, scale_grad_by_freq: bool) -> None:
    if not norm_type > 0:
        raise ConfigError(f"DistributedEmbedding: norm_type is {norm_type}; it has to be positive")
    if sparse and scale_grad_by_freq:
        raise ConfigError(
            "DistributedEmbedding: sparse and scale_grad_by_freq are both True; sparse gradients are not scaled"
        )


def checked_padding_idx(name: str, padding_idx: int | None, num_embeddings: int) -> int | None:
    """Return the padding id as a number that is not negative; raise if it is not an id."""
    if padding_idx is None:
        return None
    if not -num_embeddings <= padding_idx < num_embeddings:
        raise ConfigError(f"{name}: padding_idx is {padding_idx}; allowed: {-num_embeddings} to {num_embeddings - 1}")
    return padding_idx % num_embeddings


def normal_but_padding(deviation: float, padding_idx: int | None) -> Initialize:
    """Return a function that fills a whole weight with normal values, and the row of the padding id with zeros."""

    def initialize(whole: torch.Tensor) -> None:
        nn.init.normal_(whole, std=deviation)
        if padding_idx is not None:
            whole[padding_idx].zero_()

    return initialize


def check_id_dtype(name: str, ids: torch.Tensor) -> None:
    """Raise if ids are neither int32 nor int64."""
    if ids.dtype not in _ID_DTYPES:
        raise ConfigError(f"{name}: ids are {ids.dtype}; allowed: torch.int32 and torch.int64")


def check_ids(name: str, ids: torch.Tensor, num_embeddings: int) -> None:
    """Raise if an id is out of range on the CPU; ids on a GPU are checked by its kernels, without waiting."""
    check_id_dtype(name, ids)
    if ids.device.type != "cpu" or not ids.numel():
        return
    least, greatest = (int(one) for one in torch.aminmax(ids))
    if least < 0 or greatest >= num_embeddings:
        raise ConfigError(f"{name}: ids are from {least} to {greatest}; allowed: 0 to {num_embeddings - 1}")
