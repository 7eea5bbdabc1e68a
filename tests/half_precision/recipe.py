"""Training in half precision written out by hand in plain PyTorch, for one process: what the library is held to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Scale:
    """A loss scale as its settings say, by a list of what happened."""

    def __init__(self, init: float = 1.0, factor: float = 2.0, window: int = 0, least: float = 1.0) -> None:
        self.value, self.factor, self.window, self.least = init, factor, window, least
        self.since = 0

    def happened(self, overflow: bool) -> None:
        if not self.window:
            return
        self.since = 0 if overflow else self.since + 1
        if overflow:
            self.value = max(self.value / self.factor, self.least)
        elif self.since % self.window == 0:
            self.value *= self.factor


class Recipe:
    """A half-precision model, float32 masters, and an optimizer over the masters."""

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        *,
        microbatches: int,
        scale: Scale | None = None,
        max_norm: float | None = None,
        wide_gradients: bool = False,
    ) -> None:
        self.module = module.to(dtype)
        self.dtype = dtype
        self.trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.masters = [nn.Parameter(parameter.detach().float()) for parameter in self.trained]
        self.optimizer = optimizer(self.masters)
        self.microbatches, self.scale, self.max_norm = microbatches, scale or Scale(), max_norm
        self.sum_dtype = torch.float32 if wide_gradients else dtype
        self.overflow = False

    def step(self, batches: Sequence[torch.Tensor], loss: Loss) -> list[float]:
        """Train on the batches of all replicas; returns each replica's mean loss."""
        losses, sums = [], []
        for of_replica in batches:
            total: list[torch.Tensor | None] = [None] * len(self.trained)
            found = []
            for part in of_replica.chunk(self.microbatches):
                value = loss(self.module, part)
                found.append(value.detach())
                gradients = torch.autograd.grad(value * self.scale.value, self.trained, allow_unused=True)
                total = [
                    new if old is None else old if new is None else old + new
                    for old, new in zip(
                        total, (g if g is None else g.to(self.sum_dtype) for g in gradients), strict=True
                    )
                ]
            losses.append(float(torch.stack(found).mean()))
            sums.append([one if one is None else one / self.microbatches for one in total])
        means = sums[0]
        for others in sums[1:]:
            means = [a if b is None else b if a is None else a + b for a, b in zip(means, others, strict=True)]
        if len(batches) > 1:
            means = [one if one is None else one / len(batches) for one in means]
        self.apply(means)
        return losses

    def apply(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Update from scaled gradients."""
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = None if gradient is None else gradient.float() / self.scale.value
        given = [master.grad for master in self.masters if master.grad is not None]
        self.overflow = self.dtype is torch.float16 and not all(bool(one.isfinite().all()) for one in given)
        if not self.overflow:
            if self.max_norm is not None:
                nn.utils.clip_grad_norm_(self.masters, self.max_norm)
            self.optimizer.step()
            with torch.no_grad():
                for parameter, master in zip(self.trained, self.masters, strict=True):
                    parameter.copy_(master.to(self.dtype))
        self.scale.happened(self.overflow)
