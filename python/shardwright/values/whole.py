"""Values as a whole: what travels is a tree of types, and a body with the bytes of its tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwright import _core
from shardwright.errors import UnsupportedValueError
from shardwright.values.registry import UnknownNameError, registry
from shardwright.values.tensors import pack, unpack

if TYPE_CHECKING:
    from shardwright.runtime import Runtime


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
        raise UnsupportedValueError(f"{sender} sent rank {runtime.rank} {error}") from None
