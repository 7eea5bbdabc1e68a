"""Settings of ``transformers`` models that cannot hold across ranks."""

from __future__ import annotations

import logging

from torch import nn

from shardwright.transformers_models import collector, static_caches

logger = logging.getLogger("shardwright")


_announced = False


def prepare(module: nn.Module, *, announce: bool, generates_with_caches: bool = True) -> None:
    """Make models of ``transformers`` ready to be divided; with `announce`, this rank says so once.

    Key/value caches that a model would make itself in every call are switched off, as a step's result cannot return
    them. Generation, and calls with ``use_cache=True``, have them; generation has none of other kinds, such as lists to
    which modules write, nor any if `generates_with_caches` is False, as for layers that know none.
    """
    global _announced
    changed = []
    for name, child in module.named_modules():
        generation = getattr(child, "generation_config", None)
        has_caches = getattr(child, "_supports_default_dynamic_cache", None)
        if generation is not None and not (generates_with_caches and (has_caches is None or has_caches())):
            generation.use_cache = False
        config = getattr(child, "config", None)
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False  # type: ignore[union-attr]
            changed.append(name or type(module).__name__)
    if changed and announce and not _announced:
        _announced = True
        logger.warning(
            "use_cache was switched off in the configuration of %s, as training needs no key/value caches: generate "
            "has them all the same, and so has a call with use_cache=True",
            changed[0],
        )
    collector.install(module)
    static_caches.install(module)
