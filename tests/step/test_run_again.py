"""A step that fails for a script's reason on one rank, and would be run again for another rank's, ends on all alike."""

from __future__ import annotations

from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.job.runtime import Runtime
from torch import nn

from tests.frames.job import Job, in_process_ranks

MICROBATCHES, ROUNDS, WIDTH = 4, 60, 6


class Watched(nn.Linear):
    """A layer that uses what the backwards before have left."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(inputs) * (1 + self.mean.clone())
        if outputs.requires_grad:
            outputs.register_hook(lambda gradient: self.note(gradient.detach()))
        return outputs

    def note(self, gradient: torch.Tensor) -> None:
        with torch.no_grad():
            self.mean.mul_(0.5).add_(gradient.abs().mean())


def built() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3)]
    return nn.Sequential(layers[0], nn.Tanh(), Watched(), nn.Tanh(), layers[1], nn.Tanh(), layers[2])


@smp.step(microbatches=MICROBATCHES)
def stepped(model: smp.DistributedModel, batch: torch.Tensor) -> torch.Tensor:
    outputs = model(batch)
    if bool((batch > 1000).any()):
        raise ValueError("on purpose")
    loss: torch.Tensor = outputs.square().mean()
    model.backward(loss)
    return loss


def test_ranks_with_different_reasons_agree() -> None:
    good = torch.randn(16, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    bad = good.clone()
    bad[4] = 1e6
    net, expected = built(), list[float]()
    for _ in range(2):
        losses = []
        for part in good.chunk(MICROBATCHES):
            loss = net(part).square().mean()
            loss.backward()
            losses.append(float(loss))
        expected.append(sum(losses) / MICROBATCHES)

    def main(runtime: Runtime) -> list[Any]:
        net = built()
        smp.set_partition(net[2], 1)
        model = smp.DistributedModel(net)
        for _ in range(ROUNDS):
            with pytest.raises((ValueError, smp.RemoteError), match="on purpose"):
                stepped(model, bad)
        return [float(stepped(model, good).reduce_mean()) for _ in range(2)]

    with in_process_ranks():
        job = Job(2)
        for found in job.run(main, {"auto_partition": False, "default_partition": 0}, 120):
            assert found == pytest.approx(expected, rel=1e-12), found
        assert job.rests
        job.close()
