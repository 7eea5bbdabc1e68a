"""Automatic optimization with steps that run forward and backward at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from lightning.pytorch.plugins import MixedPrecision, Precision

from shardwright.optimizer import clip_grad_norm_


class StepClosure(Closure):
    """Clears gradients before the step, not between its forward and its backward."""

    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        """Run the step."""
        if self._zero_grad_fn is not None:
            self._zero_grad_fn()
        return self._step_fn()


class OptimizationInSteps(_AutomaticOptimization):
    """The part of Lightning's training loop that makes the closure of an update."""

    def _make_closure(self, kwargs: Any, optimizer: Any, batch_idx: int) -> StepClosure:
        return StepClosure(
            step_fn=self._make_step_fn(kwargs), zero_grad_fn=self._make_zero_grad_fn(batch_idx, optimizer)
        )


class PrecisionOverRanks(Precision):
    """Clips by the norm over the whole model, and updates after the step."""

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the step, clip gradients, update the parameters of this rank."""
        result = closure()
        self._after_closure(model, optimizer)
        optimizer.step(**kwargs)
        return result

    def clip_grad_by_norm(self, optimizer: Any, clip_val: int | float) -> None:
        """Clip the gradients of an optimizer."""
        clip_grad_norm_(self.main_params(optimizer), clip_val)


class MixedPrecisionOverRanks(PrecisionOverRanks, MixedPrecision):
    """Autocast to bfloat16, on all ranks of the model."""


def precision_over_ranks(plugin: Precision) -> PrecisionOverRanks:
    """Return what does over ranks what a plugin of Lightning does in one process.

    Raises:
        MisconfigurationException: It works in one process only.
    """
    if isinstance(plugin, PrecisionOverRanks):
        return plugin
    if type(plugin) is Precision:
        return PrecisionOverRanks()
    if type(plugin) is MixedPrecision and plugin.precision == "bf16-mixed":
        return MixedPrecisionOverRanks("bf16-mixed", plugin.device)
    raise MisconfigurationException(
        f"`Trainer(precision={getattr(plugin, 'precision', plugin)!r})` with `ShardwrightStrategy`; allowed: '32-true' "
        "and 'bf16-mixed'. For another dtype of all weights convert the module, as by `module.double()`"
    )
