"""Settings of models of ``transformers`` that change no number, and that code of a step switches around calls.

Gradient checkpointing is switched by setting attributes of every layer, which other ranks, and other microbatches that
run meanwhile, would not see, or see at any time. So in a step it stays as it is set outside.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from shardwright.patches import original_of, replaced
from shardwright.transformers_models import switching


def install(module: nn.Module, installed: ExitStack) -> None:
    """Let gradient checkpointing of a model stay as it is in steps, for as long as the job runs."""
    models = sys.modules.get("transformers.modeling_utils")
    if models is not None and any(isinstance(part, models.PreTrainedModel) for part in module.modules()):
        installed.enter_context(replaced(models.PreTrainedModel, _OF_MODELS))


@contextmanager
def without_gradient_checkpointing(model: nn.Module) -> Iterator[None]:
    """Run a block, in which no gradients are computed, without gradient checkpointing. All ranks call this."""
    parts = [one for one in model.modules() if getattr(one, "gradient_checkpointing", False) is True]
    for part in parts:
        part.gradient_checkpointing = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for part in parts:
            part.gradient_checkpointing = True  # type: ignore[assignment]


def _enable(model: Any, *args: Any, **kwargs: Any) -> None:
    """Replace ``PreTrainedModel.gradient_checkpointing_enable``."""
    if not switching.in_step():
        original_of(_enable)(model, *args, **kwargs)


def _disable(model: Any) -> None:
    """Replace ``PreTrainedModel.gradient_checkpointing_disable``."""
    if not switching.in_step():
        original_of(_disable)(model)


_OF_MODELS = {"gradient_checkpointing_enable": _enable, "gradient_checkpointing_disable": _disable}
