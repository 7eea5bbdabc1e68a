"""``shardwright run``: a script as the ranks of a job, by torchrun, and the advice to a plain start."""

from shardwright.launcher.hint import how_to_start

__all__ = ["how_to_start"]
