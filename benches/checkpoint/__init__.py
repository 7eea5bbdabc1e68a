"""Saving and loading of checkpoints, beside torch's ways and a plain copy."""
