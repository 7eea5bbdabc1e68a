"""Values that cross ranks: registered types, and tensors' bytes."""

from shardwright.values.registry import ValueRegistry, register_type, registry
from shardwright.values.tensors import pack, unpack

__all__ = ["ValueRegistry", "pack", "register_type", "registry", "unpack"]
