"""The distributed model: what this rank owns of it, and its parts as state dicts."""
