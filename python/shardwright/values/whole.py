"""Values as a whole: what travels is a tree of types, and a body with the bytes of its tensors."""

from __future__ import annotations

from typing import Any

from shardwright import _core
from shardwright.values.registry import registry
from shardwright.values.tensors import pack, unpack


def encode(value: Any) -> tuple[_core.Spec, _core.TensorParts]:
    """Take a value apart; its tensors will need no gradient where they arrive.

    Raises:
        UnsupportedValueError: It holds a value or a tensor of a type that cannot cross ranks.
    """
    spec, tensors = _core.flatten(value, registry)
    return spec, pack(tensors, [False] * len(tensors))


def decode(spec: _core.Spec, parts: _core.TensorParts) -> Any:
    """Build a received value of the library's own."""
    return spec.build(unpack(parts), registry)
