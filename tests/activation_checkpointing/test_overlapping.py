"""A grouped ``nn.Sequential`` in which one microbatch waits for an argument while another one runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import shardwright as smp
import torch
from torch import nn

from tests.frames.job import Job, job_fixture

job = job_fixture(2)


class Root(nn.Module):
    """Gives a sequence what another rank computes, so that in static mode its first layer waits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [nn.Linear(width, width, dtype=torch.float64), nn.Tanh()]
        self.far = nn.Linear(width, width, dtype=torch.float64)
        self.near = nn.Sequential(*copy.deepcopy(layers), *copy.deepcopy(layers), *copy.deepcopy(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.near(self.far(x))
        return x


@pytest.mark.parametrize("width", [8, 256])
@pytest.mark.parametrize("marked", ["near", "root"])
@pytest.mark.parametrize("strategy", ["contiguous", "group_2"])
def test_its_children_are_where_they_were_and_gradients_exact(job: Job, strategy: str, marked: str, width: int) -> None:
    torch.manual_seed(0)
    root = Root(width)
    plain, nets = copy.deepcopy(root), [copy.deepcopy(root) for _ in range(2)]
    batch = torch.randn(16, width, dtype=torch.float64)

    def main(runtime: Any) -> list[dict[str, torch.Tensor]]:
        net = nets[runtime.place.rank]
        smp.set_partition(net.far, 1)
        smp.set_activation_checkpointing(net.near, strategy=strategy)
        if marked == "root":
            smp.set_activation_checkpointing(net)
        model = smp.DistributedModel(net)

        @smp.step
        def train(x: torch.Tensor) -> None:
            model.backward(model(x).square().mean())

        found = []
        for _ in range(3):
            model.zero_grad()
            train(batch)
            found.append({n: p.grad.clone() for n, p in model.local_named_parameters() if p.grad is not None})
        return found

    given = {"auto_partition": False, "default_partition": 0, "microbatches": 4, "active_microbatches": 4}
    near, far = job.run(main, {**given, "static_mode": True, "static_steps": 1})
    for part in batch.chunk(4):
        (plain(part).square().mean() / 4).backward()
    names = dict(nets[0].named_parameters()).keys()
    assert names == dict(plain.named_parameters()).keys()
    for one, other in zip(near, far, strict=True):
        assert len(one) == 6
        assert len(other) == 2
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close({**one, **other}[name], parameter.grad, rtol=1e-11, atol=1e-13)
