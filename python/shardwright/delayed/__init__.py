"""Delayed parameter initialisation: what would make parameters is noted, and done where they are owned."""
