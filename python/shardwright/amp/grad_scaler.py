"""``smp.amp.GradScaler``: loss scaling for models in float32 that are run under ``torch.autocast``."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler as TorchGradScaler

from shardwright.errors import ConfigError
from shardwright.half_precision import half_dtype
from shardwright.job.runtime import current_runtime


class GradScaler(TorchGradScaler):
    """``torch.amp.GradScaler`` for the device of this rank (spec, 2.10).

    All ranks of a pipeline and its tensor-parallel ranks find the same infinities, so that they skip the same steps and
    have the same scale. Call :meth:`scale` in the step function, ``model.backward(scaler.scale(loss))``; and
    ``unscale_``, ``step`` and ``update`` outside it, on every rank.

    Args:
        init_scale: The first scale.
        growth_factor: What the scale is multiplied by after ``growth_interval`` steps without infinities.
        backoff_factor: What the scale is multiplied by after a step with them.
        growth_interval: See ``growth_factor``.
        enabled: Whether it has any effect.

    Raises:
        ConfigError: The job has ``fp16``, in which ``smp.DistributedOptimizer`` scales losses.
        ShardwrightError: ``smp.init`` has not been called.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        """Create it; see the class."""
        place = current_runtime().place
        if enabled and half_dtype(place.cfg) is torch.float16:
            raise ConfigError(
                "smp.amp.GradScaler in a job with fp16, in which smp.DistributedOptimizer scales losses: give it "
                "dynamic_loss_scale=True, or leave out fp16 to train in float32 under torch.autocast"
            )
        settings: dict[str, Any] = {
            "init_scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "enabled": enabled,
        }
        super().__init__(place.device.type, **settings)
