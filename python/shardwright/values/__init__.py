"""Values that are sent between ranks: registered types, and the bytes of tensors."""

from shardwright.values.register import register_type
from shardwright.values.registry import ValueRegistry, registry
from shardwright.values.tensors import pack, unpack
from shardwright.values.whole import decode, encode

__all__ = [
    "ValueRegistry",
    "decode",
    "encode",
    "pack",
    "register_type",
    "registry",
    "unpack",
]
