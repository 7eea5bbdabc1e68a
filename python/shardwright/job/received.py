"""Decoding values received from other ranks."""

from __future__ import annotations

from typing import Any

from shardwright import _core
from shardwright.errors import UnsupportedValueError
from shardwright.job.runtime import Runtime
from shardwright.values import registry, unpack
from shardwright.values.registry import UnknownNameError


def decode_from(runtime: Runtime, rank: int, spec: _core.Spec, parts: _core.TensorParts) -> Any:
    """Decode a value received from a rank.

    Raises:
        UnsupportedValueError: It holds a value of a type that is not registered here.
    """
    return build(runtime, rank, spec, unpack(parts))


def build(runtime: Runtime, rank: int, spec: _core.Spec, tensors: list[Any]) -> Any:
    """Decode a value received from a rank, with these tensors; raises as :func:`decode_from`."""
    try:
        return spec.build(tensors, registry)
    except UnknownNameError as error:
        sender = f"rank {rank} on host {runtime.node.host(rank)!r}"
        raise UnsupportedValueError(f"{sender} sent rank {runtime.place.rank} {error}") from None
