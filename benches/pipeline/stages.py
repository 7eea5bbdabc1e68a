"""Stages of a fixed cost, which they sleep, and which autograd can divide into input and weight gradients."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from benches.pipeline.ideal import StageCosts

MICROBATCHES = 8
#: Floats of an activation: 4 KiB, so that what is measured is the schedule and not the transport.
WIDTH = 1024
#: The kernel's wake-up comes up to this much too late, the more the longer the sleep: the rest is waited for in a loop.
_EARLY_SECONDS, _EARLY_SHARE = 60e-6, 2e-3
_PR_SET_TIMERSLACK = 29


class Sleeper:
    """Spends time without a processor, and to the point: what one cost took too long, the next one is shorter."""

    def __init__(self) -> None:
        """No debt yet."""
        self._debt = 0.0
        with contextlib.suppress(OSError):  # threads started from here on inherit it
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)

    def spend(self, seconds: float) -> None:
        """Return that much after the call, less what earlier calls were late."""
        now = time.perf_counter
        end = now() + seconds - self._debt
        remaining = end - now() - _EARLY_SECONDS - _EARLY_SHARE * seconds
        if remaining > 0:
            time.sleep(remaining)
        while now() < end:
            pass
        self._debt = now() - end


_sleeper = Sleeper()


class _InputPath(torch.autograd.Function):
    """The part of a stage that its input's gradient needs."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.backward_seconds = backward
        outputs = inputs.clone()  # first: what another rank still computes is waited for where its value is used
        _sleeper.spend(forward)
        return outputs

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        _sleeper.spend(ctx.backward_seconds)
        return gradient.clone(), None, None


class _WeightPath(torch.autograd.Function):
    """The part that only its weight's gradient needs: a node that is not on the way to the input."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, backward: float) -> torch.Tensor:
        ctx.backward_seconds = backward
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        _sleeper.spend(ctx.backward_seconds)
        return gradient.clone(), None


class Stage(nn.Module):
    """One stage; its costs are read at every call, so one model serves for all of them."""

    #: By stage, in seconds; set between steps.
    costs: Sequence[StageCosts] = ()

    def __init__(self, index: int) -> None:
        """The stage with this place in the chain."""
        super().__init__()
        self.index = index
        self.weight = nn.Parameter(torch.full((WIDTH,), 1e-3))
        # The batch has no gradient, so that nothing would lie behind the input path of the first stage.
        self.anchor = nn.Parameter(torch.zeros(WIDTH)) if index == 0 else None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        costs = self.costs[self.index]
        if self.anchor is not None:
            inputs = inputs + self.anchor
        hidden = _InputPath.apply(inputs, costs.forward, costs.input_gradient)
        return hidden + _WeightPath.apply(self.weight, costs.weight_gradient)


def batch() -> torch.Tensor:
    """A batch of microbatches of one row each."""
    return torch.linspace(-1.0, 1.0, MICROBATCHES * WIDTH).view(MICROBATCHES, WIDTH)


class Loss(nn.Module):
    """The loss, as a module."""

    def forward(self, output: torch.Tensor) -> torch.Tensor:
        return loss_of(output)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """A loss that costs nothing."""
    return output.square().mean()
