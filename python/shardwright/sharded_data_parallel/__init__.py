"""Sharded data parallelism: parameters, gradients and optimizer state are sharded over data-parallel ranks."""
