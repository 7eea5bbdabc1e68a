"""A checkpointed module around one that waits for earlier microbatches computes again with what that one found."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import shardwright as smp
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from tests.frames.job import Job, job_fixture

job = job_fixture(2)


class Normalised(nn.Module):
    """A linear layer whose weight is divided by an estimate of its norm, which each call improves."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = spectral_norm(nn.Linear(width, 8, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x)
        return result


class Counting(nn.Module):
    """A scale that grows with each call, in a list that it keeps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, dtype=torch.float64))
        self.scales = [torch.ones((), dtype=torch.float64)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scales.append(self.scales[-1] * 1.5)
        return torch.tanh(x * self.weight) * self.scales[-1]


class Around(nn.Module):
    """A module without state around one with state."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x.tanh())
        return result


class Root(nn.Module):
    """Calls a module on another rank a few times, so that several microbatches are in it."""

    def __init__(self, child: nn.Module, calls: int) -> None:
        super().__init__()
        self.child, self.calls = child, calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sum() * 0
        for _ in range(self.calls):
            y = y + self.child(x + y).sum()
        return y


@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
@pytest.mark.parametrize("width", [8, 1024])
@pytest.mark.parametrize(("calls", "microbatches"), [(1, 3), (2, 2), (3, 3)])
@pytest.mark.parametrize("kind", [Normalised, Counting])
def test_it_computes_with_the_state_after_the_wait(
    job: Job, kind: type[nn.Module], calls: int, microbatches: int, width: int, pipeline: str
) -> None:
    torch.manual_seed(0)
    root = Root(Around(kind(width)), calls)  # type: ignore[call-arg]
    plain, nets = copy.deepcopy(root), [copy.deepcopy(root) for _ in range(2)]
    batch = torch.randn(2 * microbatches, width, dtype=torch.float64) / 4

    def main(runtime: Any) -> list[list[torch.Tensor]]:
        net = nets[runtime.place.rank]
        smp.set_partition(net.child, 1)
        smp.set_activation_checkpointing(net.child)
        model = smp.DistributedModel(net)

        @smp.step
        def train(x: torch.Tensor) -> None:
            model.backward(model(x).tanh())

        found = []
        for _ in range(2):
            model.zero_grad()
            train(batch)
            found.append([p.grad.clone() for p in model.local_parameters() if p.grad is not None])
        return found

    given = {"auto_partition": False, "default_partition": 0, "microbatches": microbatches, "pipeline": pipeline}
    _, found = job.run(main, given)
    for gradients in found:
        plain.zero_grad()
        for part in batch.chunk(microbatches):
            (plain(part).tanh() / microbatches).backward()
        expected = [parameter.grad for parameter in plain.parameters()]
        assert len(gradients) == len(expected) > 0
        for one, other in zip(gradients, expected, strict=True):
            assert other is not None
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)
