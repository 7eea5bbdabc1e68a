"""Data parallelism: ranks of one stage average their gradients (the paper, 3.2.2)."""

from shardwright.data_parallel.collectives import Collectives
from shardwright.data_parallel.reducer import Listener
from shardwright.data_parallel.replicas import Replicas

__all__ = ["Collectives", "Listener", "Replicas"]
