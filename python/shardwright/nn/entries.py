"""The table of modules with distributed implementations in the library (paper, section 5.2)."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from shardwright.nn.embedding import DistributedEmbedding
from shardwright.nn.huggingface import REPLACED
from shardwright.nn.linear import DistributedLinear
from shardwright.tensor_parallel.registry import Entry, InitArguments


def _place(parameter: torch.Tensor) -> dict[str, object]:
    return {"device": parameter.device, "dtype": parameter.dtype}


def _linear(module: nn.Module) -> InitArguments:
    layer = cast(nn.Linear, module)
    return (layer.in_features, layer.out_features, layer.bias is not None), _place(layer.weight)


def _embedding(module: nn.Module) -> InitArguments:
    layer = cast(nn.Embedding, module)
    options = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    arguments = {name: getattr(layer, name) for name in options}
    return (layer.num_embeddings, layer.embedding_dim), {**arguments, **_place(layer.weight)}


def same_names(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's own parameters and buffers, for substitutes that have the same ones."""
    return module.state_dict(keep_vars=True)


#: Classes of torch; those of ``transformers`` are added when they are first looked up.
_ENTRIES: dict[type[nn.Module], Entry] = {
    nn.Linear: Entry(DistributedLinear, _linear, weights_hook=same_names),
    nn.Embedding: Entry(DistributedEmbedding, _embedding, weights_hook=same_names),
}


def built_in(cls: type[nn.Module]) -> Entry | None:
    """Return the library's own entry for exactly this class; None if it has no distributed implementation."""
    if cls not in _ENTRIES:
        replaced = REPLACED.get((cls.__module__, cls.__qualname__))
        if replaced is None:
            return None
        _ENTRIES[cls] = replaced.entry(cls)
    return _ENTRIES[cls]
