"""Joins that follow from the kinds of modules, without a trace: code that reads tensors of other modules."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from shardwright.partition.decision import JoinReason
from shardwright.partition.tree import ModelTree, TensorEntry, join_path


def shared_buffer_joins(entry: TensorEntry) -> dict[tuple[str, str], str]:
    """Return the joins of all holders of a buffer that changes, each with a reason."""
    first = entry.holders[0]
    return {(first, other): f"shares the buffer {entry.name} with it, which changes" for other in entry.holders[1:]}


def structural_joins(tree: ModelTree, *, traced: bool) -> tuple[JoinReason, ...]:
    """Return the joins that follow from the kinds of modules, without a trace.

    A trace reports which shared buffers change; if the model was not `traced`, all of them are assumed to.
    """
    joins: dict[tuple[str, str], str] = {}
    for entry in tree.modules:
        module = entry.module
        if isinstance(module, (nn.ParameterList, nn.ParameterDict)):
            joins.update({(parent, entry.path): "reads the parameters in it" for parent in entry.parents})
        elif isinstance(module, nn.MultiheadAttention):
            joins[(entry.path, join_path(entry.path, "out_proj"))] = "computes with its weights"
        elif isinstance(module, ParametrizationList):
            owner = entry.path.rsplit(".", 2)[0] if entry.path.count(".") > 1 else ""
            for inside in _subtree(tree, entry.path):
                joins[(owner, inside)] = "computes its parametrized weight from it"
        elif isinstance(module, torch.jit.ScriptModule) or is_compiled(module):
            kind = "scripted" if isinstance(module, torch.jit.ScriptModule) else "compiled"
            for inside in _subtree(tree, entry.path):
                joins[(entry.path, inside)] = f"is {kind}, so what it calls cannot be intercepted"
    if not traced:
        for buffer in tree.buffers:
            joins.update(shared_buffer_joins(buffer))
    return tuple(
        JoinReason(modules=pair, reason=reason) for pair, reason in sorted(joins.items()) if pair[0] != pair[1]
    )


def is_compiled(module: nn.Module) -> bool:
    """Return whether calling this module runs code made by ``torch.compile``."""
    return "_orig_mod" in module._modules or module.__dict__.get("_compiled_call_impl") is not None


def _subtree(tree: ModelTree, path: str) -> Iterator[str]:
    prefix = join_path(path, "")
    return (entry.path for entry in tree.modules if entry.path == path or entry.path.startswith(prefix))
