"""Settings of ``transformers`` models that cannot hold across ranks."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from shardwright import quantized
from shardwright.errors import FrameError
from shardwright.transformers_models import collector

logger = logging.getLogger("shardwright")


_announced = False


def prepare(module: nn.Module, *, announce: bool) -> None:
    """Make models of ``transformers`` ready to be divided; with `announce`, this rank says so once.

    Key/value caches that a model would make itself are switched off: they are state that modules share in place.
    Generation then computes every position anew, which is slower and gives the same tokens.
    """
    global _announced
    changed = []
    for name, child in module.named_modules():
        for attribute in ("config", "generation_config"):
            config = getattr(child, attribute, None)
            if getattr(config, "use_cache", None) is True:
                config.use_cache = False  # type: ignore[union-attr]
                changed.append(name or type(module).__name__)
    if changed and announce and not _announced:
        _announced = True
        logger.warning(
            "use_cache was switched off in the configuration of %s: key/value caches are state that modules on "
            "different ranks cannot share, and training needs none",
            changed[0],
        )
    collector.install(module)
    quantized.prepare(module)


def refuse_cache(module: str, rank: int, arguments: Any) -> None:
    """Raise :class:`FrameError` if a key/value cache is among the arguments of a call to another rank."""
    if holds_cache(arguments):
        raise FrameError(
            f"module {module!r}, which rank {rank} owns, was given a key/value cache, which modules on different ranks "
            "cannot share: pass use_cache=False and no past_key_values"
        )


def holds_cache(values: Any) -> bool:
    """Whether a key/value cache is among arguments or results."""
    caches = sys.modules.get("transformers.cache_utils")
    return caches is not None and _holds(values, caches.Cache)


def _holds(value: Any, kind: type) -> bool:
    if isinstance(value, Mapping):
        return any(_holds(item, kind) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_holds(item, kind) for item in value)
    return isinstance(value, kind)
