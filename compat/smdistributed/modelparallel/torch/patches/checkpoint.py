"""Activation checkpointing of a call; ``smp.set_activation_checkpointing`` is for modules."""

from shardwright import checkpoint, checkpoint_sequential

__all__ = ["checkpoint", "checkpoint_sequential"]
