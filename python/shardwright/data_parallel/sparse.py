"""Averaging sparse gradients over replicas; they stay sparse, as ``torch.optim.SparseAdam`` requires."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from shardwright.data_parallel.collectives import Collectives
from shardwright.half_precision import gradient_dtype
from shardwright.nn.embedding import DistributedEmbedding

#: What a rank tells of a parameter: no gradient, a dense one, or the number of entries above this.
_NONE, _DENSE, _FIRST = 0, 1, 2
_MODULES = (nn.Embedding, nn.EmbeddingBag, DistributedEmbedding)


def sparse_parameters(model: nn.Module) -> set[int]:
    """The ``id`` of the weights of embeddings with sparse gradients, the same on all replicas."""
    modules = [one for one in model.modules() if isinstance(one, _MODULES) and one.sparse]
    return {id(one.weight) for one in modules}


def reduce_sparse(parameters: Sequence[nn.Parameter], collectives: Collectives, num_ranks: int) -> None:
    """Average sparse gradients over replicas, of the same parameters in one order, and keep them sparse.

    Each rank writes its entries to its own place among zeros, so that a sum over ranks gathers them; it is divided by
    ``num_ranks``. A gradient that is dense on any rank, of a weight that is used elsewhere too, becomes dense on all.
    """
    if not parameters:
        return
    rank = collectives.own_place
    sizes = torch.zeros(len(collectives.ranks), len(parameters), dtype=torch.int64, device=parameters[0].device)
    own = [_coalesced(parameter.grad) for parameter in parameters]
    sizes[rank] = torch.tensor([_encoded_size(gradient) for gradient in own])
    collectives.wait_on_host(collectives.sum(sizes))
    for parameter, gradient, of_ranks in zip(parameters, own, sizes.t().tolist(), strict=True):
        if not any(of_ranks):
            continue
        if _DENSE in of_ranks:
            total = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
            if gradient is not None:
                total += gradient
            collectives.wait(collectives.sum(total))
            parameter.grad = total.div_(num_ranks)
            continue
        numbers = [max(0, one - _FIRST) for one in of_ranks]
        first = sum(numbers[:rank])
        indices = torch.zeros(sum(numbers), dtype=torch.int64, device=parameter.device)
        shape = (sum(numbers), math.prod(parameter.shape[1:]))
        values = parameter.new_zeros(shape, dtype=gradient_dtype(parameter))
        if gradient is not None:
            indices[first : first + numbers[rank]] = gradient.indices()[0]
            values[first : first + numbers[rank]] = gradient.values().flatten(1)
        works = [collectives.sum(indices), collectives.sum(values)]
        for work in works:
            collectives.wait_on_host(work)
        values = values.div_(num_ranks).view(-1, *parameter.shape[1:])
        whole = torch.sparse_coo_tensor(indices[None], values, parameter.shape, check_invariants=True)
        parameter.grad = whole.coalesce()


def _coalesced(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return gradient.coalesce() if gradient is not None and gradient.is_sparse else gradient


def _encoded_size(gradient: torch.Tensor | None) -> int:
    if gradient is None:
        return _NONE
    return gradient.indices().shape[1] + _FIRST if gradient.is_sparse else _DENSE
