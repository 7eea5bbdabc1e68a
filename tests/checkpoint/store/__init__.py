"""Checkpoints in an object store, held against a server of the same protocol."""
