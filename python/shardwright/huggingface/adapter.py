"""Settings of ``transformers`` models that cannot hold across ranks."""

from __future__ import annotations

import logging

from torch import nn

from shardwright.huggingface.collector import install_hooks

logger = logging.getLogger("shardwright")


def prepare(module: nn.Module) -> None:
    """Make a model ready to be divided, on every rank alike.

    Key/value caches that a model would make itself are switched off: they are state that modules share in place.
    Generation then computes every position anew, which is slower and gives the same tokens. The hooks that collect
    outputs are installed, because only the rank that is called first would do it.
    """
    install_hooks(module)
    changed = []
    for name, child in module.named_modules():
        for attribute in ("config", "generation_config"):
            config = getattr(child, attribute, None)
            if getattr(config, "use_cache", None) is True:
                config.use_cache = False  # type: ignore[union-attr]
                changed.append(name or type(module).__name__)
    if changed:
        logger.info("use_cache was switched off: key/value caches cannot be shared by modules on different ranks")
