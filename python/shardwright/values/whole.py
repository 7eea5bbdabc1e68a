"""Encode and decode values: a tree of types, and a message body with the bytes of the tensors."""

from __future__ import annotations

from typing import Any

from shardwright import _core
from shardwright.values.registry import registry
from shardwright.values.tensors import pack, unpack


def encode(value: Any) -> tuple[_core.Spec, _core.TensorParts]:
    """Encode a value. Its tensors do not require a gradient when they are decoded.

    Raises:
        UnsupportedValueError: It contains a value or a tensor of a type that cannot cross ranks.
    """
    spec, tensors = _core.flatten(value, registry)
    return spec, pack(tensors, [False] * len(tensors))


def decode(spec: _core.Spec, parts: _core.TensorParts) -> Any:
    """Decode a value from :func:`encode`."""
    return spec.build(unpack(parts), registry)
