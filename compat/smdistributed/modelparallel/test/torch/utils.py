"""Weights in a file, and a later look at whether a model still has them."""

from __future__ import annotations

import shardwright
import torch

__all__ = ["dump_model", "verify"]


def dump_model(model: shardwright.DistributedModel, path: str) -> None:
    """Write the whole state dict of a model to a file, without pickle. All ranks must call this.

    Args:
        model: The model.
        path: The file, which rank 0 writes.
    """
    state = model.state_dict()
    if shardwright.rank() == 0:
        shardwright.save(state, path, partial=False)
    shardwright.barrier()


def verify(model: shardwright.DistributedModel, path: str, rtol: float = 1e-5, atol: float = 1e-8) -> None:
    """Check that a model has the weights that :func:`dump_model` wrote. All ranks must call this.

    Args:
        model: The model, divided as it likes.
        path: The file, which all ranks can read.
        rtol: The relative difference that is allowed for each element.
        atol: The absolute one.

    Raises:
        AssertionError: Names or values differ; on all ranks.
    """
    found, expected = model.state_dict(), shardwright.load(path, partial=False)
    problem = None
    if found.keys() != expected.keys():
        only = sorted(found.keys() ^ expected.keys())
        problem = f"{only[0]!r} is in one of them only"
    for name in found if problem is None else ():
        if not isinstance(found[name], torch.Tensor):
            continue
        own, theirs = found[name].cpu(), expected[name]
        if own.shape != theirs.shape or not torch.allclose(own.double(), theirs.double(), rtol, atol, equal_nan=True):
            problem = f"{name!r} differs"
            break
    problems = [one for one in shardwright.allgather(problem, shardwright.CommGroup.WORLD) if one is not None]
    if problems:
        raise AssertionError(f"the model is not that of {path!r}: {problems[0]}")
