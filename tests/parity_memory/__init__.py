"""Parity with one process of what saves memory: each feature has a file in ``features``."""
