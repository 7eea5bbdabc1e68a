"""Values that other ranks have sent."""

from __future__ import annotations

from typing import Any

from shardwright import _core
from shardwright.errors import UnsupportedValueError
from shardwright.job.runtime import Runtime
from shardwright.values import registry, unpack
from shardwright.values.registry import UnknownNameError


def decode_from(runtime: Runtime, rank: int, spec: _core.Spec, parts: _core.TensorParts) -> Any:
    """Build a value that a rank has sent.

    Raises:
        UnsupportedValueError: It holds a value of a type that is not registered here.
    """
    return build(runtime, rank, spec, unpack(parts))


def build(runtime: Runtime, rank: int, spec: _core.Spec, tensors: list[Any]) -> Any:
    """Build a value that a rank has sent, with these tensors in it.

    Raises:
        UnsupportedValueError: It holds a value of a type that is not registered here.
    """
    try:
        return spec.build(tensors, registry)
    except UnknownNameError as error:
        sender = f"rank {rank} on host {runtime.node.host(rank)!r}"
        raise UnsupportedValueError(f"{sender} sent rank {runtime.place.rank} {error}") from None
