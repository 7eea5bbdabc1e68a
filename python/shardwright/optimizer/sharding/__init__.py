"""Optimizer state sharding: each of the ranks that hold the same parameters updates a share of them (spec, 2.8.3)."""
