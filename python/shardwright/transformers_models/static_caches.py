"""Static caches that ``generate`` makes, without noting on the model how long the longest was.

What a model notes in a step function is noted on one rank only, and its microbatches would have to wait for each other.
It is noted so that compiled code fits the next generation too; a model whose parts are on several ranks has none.
"""

from __future__ import annotations

import sys
from types import MethodType
from typing import Any

from torch import nn


class _Reading:
    """A model of which attributes are read; those that are set are gone with this object."""

    def __init__(self, model: nn.Module) -> None:
        self.__dict__["_model"] = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_model"], name)


def _prepare_static_cache(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand before ``GenerationMixin._prepare_static_cache`` of a model."""
    return type(model)._prepare_static_cache(_Reading(model), *args, **kwargs)


def install(module: nn.Module) -> None:
    """Let the models in a module make static caches without setting attributes."""
    generation = sys.modules.get("transformers.generation.utils")
    if generation is None:
        return
    for part in module.modules():
        if isinstance(part, generation.GenerationMixin):
            vars(part)["_prepare_static_cache"] = MethodType(_prepare_static_cache, part)
