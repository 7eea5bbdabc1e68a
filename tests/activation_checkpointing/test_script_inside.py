"""A script's own checkpoint inside a marked module that spans ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import shardwright as smp
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.frames.job import Job, job_fixture

job = job_fixture(2)


class Block(nn.Module):
    """Two layers, so that an intercepted module has modules of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 8, dtype=torch.float64), nn.Tanh(), nn.Linear(8, width).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x).sin()
        return result


class Root(nn.Module):
    """Calls a module beside it, or its layers, in a checkpoint, and one on another rank outside of it."""

    def __init__(self, width: int, what: str, reentrant: bool) -> None:
        super().__init__()
        self.near, self.far = Block(width), Block(width)
        self.what, self.reentrant = what, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        function = {"module": self.near, "inner": self.near.layers, "lambda": lambda y: self.far(self.near(y))}
        y: torch.Tensor = checkpoint(function[self.what], self.far(x), use_reentrant=self.reentrant)
        return self.near(y) + self.far(y)


@pytest.mark.parametrize("width", [8, 1024])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("what", ["module", "inner", "lambda"])
def test_gradients_are_those_without_a_mark(job: Job, what: str, reentrant: bool, width: int) -> None:
    torch.manual_seed(0)
    root = Root(width, what, reentrant)
    plain, nets = copy.deepcopy(root), [copy.deepcopy(root) for _ in range(2)]
    batch = torch.randn(6, width, dtype=torch.float64) / 4

    def main(runtime: Any) -> list[list[torch.Tensor]]:
        net = nets[runtime.place.rank]
        smp.set_partition(net.far, 1)
        smp.set_activation_checkpointing(net)
        model = smp.DistributedModel(net)

        @smp.step
        def train(x: torch.Tensor) -> None:
            model.backward(model(x).square().mean())

        found = []
        for _ in range(2):
            model.zero_grad()
            train(batch)
            found.append([p.grad.clone() for _, p in model.local_named_parameters() if p.grad is not None])
        return found

    given = {"auto_partition": False, "default_partition": 0, "microbatches": 3}
    near, far = job.run(main, given)
    for part in batch.chunk(3):
        (plain(part).square().mean() / 3).backward()
    for gradients, block in ((near, plain.near), (far, plain.far)):
        expected = [parameter.grad for parameter in block.parameters()]
        for step in gradients:
            assert len(step) == len(expected) == 4
            for one, other in zip(step, expected, strict=True):
                assert other is not None
                torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)
