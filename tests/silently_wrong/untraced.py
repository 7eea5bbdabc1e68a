"""Models that are divided without a trace, so that nothing tells what modules share past arguments and results."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from shardwright.config import load_config
from shardwright.job.runtime import current_runtime
from torch import nn

from tests.silently_wrong.scenario import Exact, scenario, square, train
from tests.silently_wrong.stages import WIDTH, Layer, Noting, TwoStages


def _untraced(module: nn.Module) -> Exact:
    runtime = current_runtime()
    before = runtime.place
    cfg = load_config({**before.cfg.to_dict(), "skip_tracing": True}, {}, {})
    runtime.place = dataclasses.replace(before, cfg=cfg)
    try:
        return train(module, square)
    finally:
        runtime.place = before


@scenario
def untraced_a_plain_step() -> Any:
    return _untraced(TwoStages())


class NotingStages(TwoStages):
    """Reads what a child elsewhere has left behind."""

    def __init__(self) -> None:
        super().__init__()
        self.there = Noting()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.there.penalty


@scenario
def untraced_an_attribute_that_a_module_elsewhere_sets() -> Any:
    return _untraced(NotingStages())


class KeepingStages(TwoStages):
    """Keeps a tensor until another rank has answered, when another microbatch may have set it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.here(x)
        return self.again(self.there(self.kept)) + self.kept


@scenario
def untraced_an_attribute_that_is_kept_during_a_call() -> Any:
    return _untraced(KeepingStages())


class CountingStages(TwoStages):
    """Sets an attribute to what it is."""

    width = WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.width = WIDTH

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.width = x.shape[-1]
        return super().forward(x) * self.width


@scenario
def untraced_an_attribute_that_does_not_change() -> Any:
    return _untraced(CountingStages())


class ReadingStages(TwoStages):
    """Computes with a weight of a module elsewhere."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) @ self.there.linear.weight


@scenario
def untraced_a_weight_of_a_module_elsewhere() -> Any:
    return _untraced(ReadingStages())


class Averaging(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(WIDTH))


class WritingStages(TwoStages):
    """Writes to a buffer of a module elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.there = Averaging()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        with torch.no_grad():
            self.there.mean.add_(x.mean(0))
        return x


@scenario
def untraced_a_buffer_of_a_module_elsewhere() -> Any:
    return _untraced(WritingStages())
