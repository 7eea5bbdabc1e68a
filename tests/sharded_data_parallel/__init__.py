"""Sharded data parallelism."""
