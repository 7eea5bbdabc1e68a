"""Tensor parallelism: modules divided over data-parallel ranks (paper, section 5 and appendices E, F and I).

The modules themselves are in ``shardwright.nn``.
"""
