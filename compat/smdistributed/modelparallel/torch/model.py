"""``smp.model``."""

from shardwright.model import DistributedModel

__all__ = ["DistributedModel"]
