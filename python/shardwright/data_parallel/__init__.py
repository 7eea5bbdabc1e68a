"""Data parallelism: ranks of one stage average their gradients (the paper, 3.2.2)."""

from shardwright.data_parallel.collectives import Collectives
from shardwright.data_parallel.reducer import GradientListener
from shardwright.data_parallel.replicas import Replicas

__all__ = ["Collectives", "GradientListener", "Replicas"]
