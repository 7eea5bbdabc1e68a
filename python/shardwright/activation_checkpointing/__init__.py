"""Activation checkpointing: modules that keep only their arguments, and are computed again in the backward."""
