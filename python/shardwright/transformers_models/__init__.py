"""What models of ``transformers`` need before they are split."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from shardwright import quantized
from shardwright.transformers_models import adapter_methods, settings
from shardwright.transformers_models.adapter import prepare
from shardwright.transformers_models.adapter_changes import Divided
from shardwright.transformers_models.switching import unswitched

__all__ = ["as_traced", "install", "prepare"]


@contextmanager
def as_traced(module: nn.Module) -> Iterator[None]:
    """Run a trace of a model: with the adapters of outside of steps, and weights of few bits left as they are."""
    with unswitched(), quantized.traceable(module):
        yield


def install(module: nn.Module, model_id: int, installed: ExitStack, adapters: Divided, *, pipelined: bool) -> None:
    """Let code of steps switch what it may of a model, alike for all degrees, for as long as the job runs."""
    if pipelined:
        settings.install(module, installed)
    adapter_methods.install(module, model_id, installed, adapters, pipelined=pipelined)
