"""State dicts of models with replaced modules: with the names and layouts of one process, and with distributed ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shardwright.tensor_parallel.module import DistributedModule, distributed_modules


def replaced(module: nn.Module) -> Iterator[tuple[str, DistributedModule]]:
    """Yield the modules that have replaced others with other weights, and what their names begin with."""
    named = distributed_modules(module, each_once=False)
    return ((f"{prefix}." if prefix else "", one) for prefix, one in named if one.origins)


def as_distributed(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a whole state dict that the model has in one process with the names and layouts of distributed modules.

    Weights of a replaced module that are not all there stay as they are, as do all other entries.
    """
    result = dict(state)
    for prefix, one in replaced(module):
        for ours, origins in one.origins.items():
            names = [prefix + origin.name for origin in origins]
            if not all(name in state for name in names):
                continue
            wholes = [
                state[name].mT if origin.transposed else state[name]
                for name, origin in zip(names, origins, strict=True)
            ]
            count = sum(rows for origin in origins for *_, rows in origin.rows)
            joined = torch.empty(count, *wholes[0].shape[1:], dtype=wholes[0].dtype)
            for whole, origin in zip(wholes, origins, strict=True):
                for first, theirs, rows in origin.rows:
                    joined[first : first + rows] = whole[theirs : theirs + rows]
            for name in names:
                result.pop(name, None)
            result[prefix + ours] = joined
    return result


def as_in_one_process(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a whole state dict of distributed modules with the names and layouts that the model has in one process."""
    result = dict(state)
    for prefix, one in replaced(module):
        for ours, origins in one.origins.items():
            joined = result.pop(prefix + ours, None)
            if joined is None:
                continue
            for origin in origins:
                whole = result.setdefault(prefix + origin.name, joined.new_empty(origin.shape))
                laid_out = whole.mT if origin.transposed else whole
                for first, theirs, rows in origin.rows:
                    laid_out[theirs : theirs + rows] = joined[first : first + rows]
    return result
