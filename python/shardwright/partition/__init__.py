"""From a model to a decision: which module runs on which rank."""

from shardwright.partition.manual import partition, set_partition
from shardwright.partition.trace import is_tracing

__all__ = ["is_tracing", "partition", "set_partition"]
