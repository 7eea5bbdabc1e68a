"""Modules that ``torch.jit`` has compiled run on other ranks like any other."""

from __future__ import annotations

from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.job.runtime import Runtime
from shardwright.model.sentinel import is_sentinel
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.frames.job import Job, job_fixture

job = job_fixture(2)

#: Rows and columns of a batch: a few numbers, and more than a message takes along.
SIZES = [(8, 4), (80, 160)]


class Around(nn.Module):
    """A module with a scripted or a traced one inside."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x) * 2
        return result


class Model(nn.Module):
    """A layer, and a compiled one behind it that is called twice."""

    def __init__(self, width: int, compiled: str, around: bool, checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.checkpointed = checkpointed
        self.first = nn.Linear(width, width)
        inner: Any = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        inner = torch.jit.script(inner) if compiled == "script" else torch.jit.trace(inner, torch.rand(2, width))
        self.compiled = Around(inner) if around else inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = checkpoint(self.part, x, use_reentrant=False) if self.checkpointed else self.part(x)
        return x.square().mean()

    def part(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.compiled(self.compiled(x)).sin()
        return result


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("compiled", ["script", "trace"])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_compiled_module_elsewhere_is_exact(
    job: Job, place: int, compiled: str, around: bool, checkpointed: bool, size: tuple[int, int]
) -> None:
    batch, width = torch.rand(*size), size[1]
    plain = Model(width, compiled, around, checkpointed)
    for part in batch.chunk(2):
        (plain(part) / 2).backward()

    def main(runtime: Runtime) -> dict[str, torch.Tensor | None]:
        module = Model(width, compiled, around, checkpointed)  # torch's copies of such modules have no parameters
        smp.set_partition(module.first, 1 - place)
        smp.set_partition(module.compiled, place)
        model = smp.DistributedModel(module)

        @smp.step
        def train(part: torch.Tensor) -> torch.Tensor:
            loss = model(part)
            model.backward(loss)
            return loss

        train(batch)
        return {name: p.grad for name, p in module.named_parameters() if not is_sentinel(p)}

    found: dict[str, torch.Tensor | None] = {}
    for result in job.run(main, {"auto_partition": False, "default_partition": 0, "microbatches": 2}):
        assert isinstance(result, dict), result
        found |= result
    for name, parameter in plain.named_parameters():
        gradient = found[name]
        assert gradient is not None
        torch.testing.assert_close(gradient, parameter.grad)
