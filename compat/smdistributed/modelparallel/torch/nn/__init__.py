"""``smp.nn``: distributed modules."""

from importlib import import_module

from shardwright.nn import *  # noqa: F403
from shardwright.nn import __all__ as _names

__all__ = [*_names]

for _name in ("huggingface", "utils"):  # which take the places of the modules of `shardwright.nn`
    import_module(f"{__name__}.{_name}")
