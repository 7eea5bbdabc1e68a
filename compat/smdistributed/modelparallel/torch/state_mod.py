"""``state``, where some scripts import it from."""

from shardwright import state

__all__ = ["state"]
