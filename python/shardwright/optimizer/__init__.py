"""Optimizers for partitioned models, and gradient clipping."""

from shardwright.optimizer.clip import clip_grad_norm_
from shardwright.optimizer.distributed_optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer", "clip_grad_norm_"]
