"""One rank of a job whose tasks take random times; prints a digest of its gradients for each of several runs."""

from __future__ import annotations

import hashlib
import json
import random
import time
from typing import Any

import shardwright as smp
import torch
from torch import nn

RUNS = 6
MICROBATCHES = 4
PAUSE_SECONDS = 0.02
pauses = random.Random()


class Pause(torch.autograd.Function):
    """Takes its time in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(pauses.random() * PAUSE_SECONDS)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        time.sleep(pauses.random() * PAUSE_SECONDS)
        return gradient


class Branch(nn.Module):
    """Calls a module that the other branch calls too."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own, self.shared = nn.Linear(16, 16), shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Pause.apply(self.shared(Pause.apply(self.own(x))))  # type: ignore[no-any-return, no-untyped-call]


class Model(nn.Module):
    """Two branches whose backwards run at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(16, 16)
        self.left, self.right = Branch(self.shared), Branch(self.shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) + self.right(x)


@smp.step
def train(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def digest(deterministic: bool, run: int) -> str:
    """The bits of this rank's gradients after two steps of a job of its own."""
    smp.init(pipeline_parallel_degree=3, microbatches=MICROBATCHES, deterministic_server=deterministic)
    torch.manual_seed(0)
    module = Model()
    for name, rank in {"shared": 1, "left": 1, "right": 2, "left.own": 1, "right.own": 2}.items():
        smp.set_partition(module.get_submodule(name), rank)
    model = smp.DistributedModel(module)
    batch = torch.randn(MICROBATCHES * 8, 16, generator=torch.Generator().manual_seed(0))
    pauses.seed(1000 * run + smp.rank())
    for _ in range(2):
        train(model, batch)
    gradients = [parameter.grad for _, parameter in sorted(model.local_named_parameters())]
    smp.shutdown()
    return hashlib.sha256(b"".join(bytes(g.numpy()) for g in gradients if g is not None)).hexdigest()


if __name__ == "__main__":
    found = {name: [digest(name == "one order", run) for run in range(RUNS)] for name in ("any order", "one order")}
    print(json.dumps(found), flush=True)
