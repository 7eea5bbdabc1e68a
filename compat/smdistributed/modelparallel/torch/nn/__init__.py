"""``smp.nn``: distributed modules."""

from shardwright.nn import *  # noqa: F403
from shardwright.nn import __all__ as _names

__all__ = [*_names]
