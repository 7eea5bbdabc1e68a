"""Settings of ``transformers`` models that cannot hold across ranks."""

from __future__ import annotations

import logging

from torch import nn

logger = logging.getLogger("shardwright")


def prepare(module: nn.Module) -> None:
    """Switch off key/value caches that a model would make itself: they are state that modules share in place.

    Generation then computes every position anew, which is slower and gives the same tokens.
    """
    changed = []
    for name, child in module.named_modules():
        for attribute in ("config", "generation_config"):
            config = getattr(child, attribute, None)
            if getattr(config, "use_cache", None) is True:
                config.use_cache = False  # type: ignore[union-attr]
                changed.append(name or type(module).__name__)
    if changed:
        logger.info("use_cache was switched off: key/value caches cannot be shared by modules on different ranks")
