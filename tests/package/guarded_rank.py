"""A rank that prints which functions are replaced at the moments of its life; its argument is the configuration."""

from __future__ import annotations

import json
import sys
from typing import Any

import shardwright as smp
import torch
from torch import nn

from tests.package import replacements as everything


class Shared:
    """Something that two modules hold."""

    def __init__(self) -> None:
        self.calls = 0


class Layer(nn.Module):
    """Tells what is replaced while it runs."""

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared = shared
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.shared.calls += 1
        # Not a global variable of this module: a trace watches all that these lead to, here every function there is.
        from tests.package import replacements

        replacements.tell("traced" if smp.is_tracing() else None)
        out: torch.Tensor = self.linear(x)
        return out


class Registered(nn.Module):
    """Is registered for tensor parallelism."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


@smp.step
def step(model: Any, x: torch.Tensor) -> None:
    model.backward(model(x).sum())


def refused(act: Any) -> str:
    """How a step ends that does this in its code."""

    @smp.step
    def acting(model: Any, x: torch.Tensor) -> None:
        model.backward(model(x).sum())
        act()

    try:
        acting(model, torch.ones(4, 3))
    except smp.FrameError as error:
        return str(error)
    return "nothing"


torch.optim.SGD([torch.ones(1)], lr=0.1)  # torch itself replaces `step` of an optimizer's class, the first time
everything.begin()
with smp.tensor_parallelism():
    everything.tell("created")
everything.tell("before")
smp.init(json.loads(sys.argv[1]))
everything.tell("started")
shared = Shared()
module = nn.Sequential(Layer(shared), Layer(shared))
smp.set_partition(module[1], smp.pp_size() - 1)
model = smp.DistributedModel(module)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step(model, torch.ones(4, 3))
everything.within("verified")
if smp.tp_size() == 1:
    smp.verify(step, model, torch.ones(4, 3))
everything.within("stepping")
if smp.size() == 1:
    for name, act in {
        "Sequential.zero_grad": module.zero_grad,
        "SGD.zero_grad": optimizer.zero_grad,
        "SGD.step": optimizer.step,
    }.items():
        print(json.dumps({"moment": name, "refused": refused(act)}), flush=True)
smp.shutdown()
everything.tell("ended")
smp.tp_register(smp.nn.DistributedLinear, lambda size: ((size, size), {}))(Registered)
everything.tell("registered")
