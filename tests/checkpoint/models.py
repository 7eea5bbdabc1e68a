"""Models with what a checkpoint can get wrong."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import shardwright as smp
import torch
from torch import nn

WIDTH = 40


class Odd(nn.Module):
    """Odd sizes, scalars, tensors without elements, buffers of all kinds, tied weights over ranks, extra state."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(7, width)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, width), nn.Dropout(0.25), nn.Tanh()) for _ in range(3)]
        )
        self.last = nn.Linear(width, 7)
        self.last.weight = nn.Parameter(self.last.weight.detach().clone())
        self.again = nn.Linear(7, width)
        self.again.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Parameter(torch.randn(5, 3), requires_grad=False)
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("small", torch.randn(3).bfloat16())
        self.register_buffer("passing", torch.randn(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        for layer in self.layers:
            x = x + layer(x)
        y = self.last(x) * self.scale
        return torch.as_tensor(self.last(torch.tanh(self.again(y))) + self.nothing.sum())


class Counting(nn.Module):
    """A module that keeps what is no tensor in its state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 7)
        self.calls: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.inner(x))

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class Training:
    """A model in training."""

    def __init__(self, kind: str = "AdamW", module: nn.Module | None = None, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = smp.DistributedModel(Odd() if module is None else module)
        options: dict[str, Any] = {"AdamW": {"lr": 1e-2}, "SGD": {"lr": 1e-2, "momentum": 0.9}}[kind]
        made = getattr(torch.optim, kind)(self.model.parameters(), **options)
        scaling: dict[str, Any] = {}
        if smp.state.cfg.fp16:  # with a scale that changes soon; without one, gradients would be subnormal numbers
            scaling = {"dynamic_loss_scale": True, "init_scale": 2.0**9, "scale_window": 2}
        self.optimizer: Any = smp.DistributedOptimizer(made, **scaling)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=10)
        self.losses: list[float] = []

    def run(self, steps: int) -> None:
        """Train on random batches, which come from all kinds of generators."""
        model = self.model

        @smp.step
        def train_step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            model.backward(loss)
            return loss

        for _ in range(steps):
            x = torch.randn(4, 7) + random.gauss(0.0, 1.0) + float(np.random.standard_normal())
            self.optimizer.zero_grad()
            self.losses.append(float(train_step(x).reduce_mean()))
            self.optimizer.step()
            self.scheduler.step()

    def content(self) -> Any:
        """What the script saves besides."""
        return {"scheduler": self.scheduler.state_dict(), "losses": self.losses}

    def take(self, content: Any) -> None:
        """What the script takes back."""
        self.scheduler.load_state_dict(content["scheduler"])
        self.losses = content["losses"]
