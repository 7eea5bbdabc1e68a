"""Decides which module of a model runs on which rank."""

from shardwright.partition.manual import partition, set_partition
from shardwright.partition.trace import is_tracing

__all__ = ["is_tracing", "partition", "set_partition"]
