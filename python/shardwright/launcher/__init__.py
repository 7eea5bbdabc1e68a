"""``shardwright run``: a script as the ranks of a job, by torchrun, and how to start one that was started as plain Python."""

from shardwright.launcher.hint import how_to_start

__all__ = ["how_to_start"]
