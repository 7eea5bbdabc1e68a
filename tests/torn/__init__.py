"""Checkpoints whose writing ends anywhere, and whose files are changed anywhere."""
