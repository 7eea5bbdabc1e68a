"""The distributed model: what this rank owns of it, how it runs, and its parts as state dicts."""

from shardwright.model.distributed import DistributedModel

__all__ = ["DistributedModel"]
