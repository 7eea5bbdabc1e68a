"""Hooks on a remote result that was handed on to another rank, or used, before they were registered."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import shardwright as smp
import torch
from torch import nn

from tests.frames.job import Job, job_fixture

job = job_fixture(3)


def clamp(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp(-1e-3, 1e-3)  # of parts of a gradient, it is not that of their sum


class Root(nn.Module):
    """Hands a result of one rank on to another, and then registers hooks on it."""

    def __init__(self, width: int, way: str) -> None:
        super().__init__()
        self.first, self.second, self.near = (nn.Linear(width, width, dtype=torch.float64) for _ in range(3))
        self.way = way
        self.found: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        loss = self.second(y).sum()
        if self.way != "handed on":
            loss = loss + y.sin().sum() + self.near(y).sum()
        if self.way == "retained":
            y.retain_grad()
            self.found.append(y)
        else:
            y.register_hook(lambda gradient: self.found.append(gradient.clone()))
            y.register_hook(clamp)
        return loss


def gradients_found(root: Root) -> list[torch.Tensor]:
    found = [one.grad if one.requires_grad else one for one in root.found]
    root.found.clear()
    return [one for one in found if one is not None]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("width", [5, 700])
@pytest.mark.parametrize("way", ["handed on", "used too", "retained"])
def test_they_see_the_whole_gradient(job: Job, way: str, width: int, static: bool) -> None:
    torch.manual_seed(0)
    root = Root(width, way)
    plain, nets = copy.deepcopy(root), [copy.deepcopy(root) for _ in range(3)]
    batch = torch.randn(4, width, dtype=torch.float64)

    def main(runtime: Any) -> list[Any]:
        net = nets[runtime.place.rank]
        smp.set_partition(net.first, 1)
        smp.set_partition(net.second, 2)
        model = smp.DistributedModel(net)

        @smp.step
        def train(x: torch.Tensor) -> None:
            model.backward(model(x))

        found = []
        for _ in range(3):
            model.zero_grad()
            train(batch)
            own = {name: p.grad.clone() for name, p in model.local_named_parameters() if p.grad is not None}
            found.append((own, gradients_found(net) if runtime.place.rank == 0 else []))
        return found

    given = {"auto_partition": False, "default_partition": 0, "microbatches": 2, "active_microbatches": 1}
    ranks = job.run(main, {**given, "static_mode": static, "fast_mode": static, "static_steps": 1})
    for part in batch.chunk(2):
        plain(part).backward()
    seen = gradients_found(plain)
    assert len(seen) == 2
    expected = {name: p.grad / 2 for name, p in plain.named_parameters() if p.grad is not None}
    for step in zip(*ranks, strict=True):
        own = {name: gradient for gradients, _ in step for name, gradient in gradients.items()}
        assert own.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(own[name], gradient, rtol=1e-11, atol=1e-13)
        assert len(step[0][1]) == len(seen)
        for one, other in zip(step[0][1], seen, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)
