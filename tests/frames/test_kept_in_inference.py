"""A module that keeps a tensor it was given in inference mode, where tensors have no versions."""

import pytest
import shardwright as smp
import torch
from shardwright.errors import FrameError, RemoteError
from shardwright.job.runtime import Runtime
from torch import nn

from tests.frames.job import Job, job_fixture

job = job_fixture(2)


class Keeps(nn.Module):
    """Gives what it was given in the call before."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.before: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before, self.before = self.before, x
        return x * self.weight if before is None else before * self.weight


class Writes(nn.Module):
    """Writes to a tensor between two calls of a module that keeps it."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.keeps = Keeps()
        self.writes = writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        self.keeps(x)
        if self.writes:
            x.mul_(3)
        return self.keeps(x)


@pytest.mark.parametrize("rows", [2, 400])
@pytest.mark.parametrize("writes", [False, True])
def test_a_write_to_what_it_keeps_is_noticed(job: Job, writes: bool, rows: int) -> None:
    inputs = torch.randn(rows, 8)

    def main(runtime: Runtime) -> torch.Tensor:
        module = Writes(writes=writes)
        smp.set_partition(module.keeps, 1)
        model = smp.DistributedModel(module)

        @smp.step(microbatches=1)
        def evaluate(x: torch.Tensor) -> torch.Tensor:
            return model(x)

        with torch.inference_mode():
            return evaluate(inputs).concat()

    results = job.run(main, {"auto_partition": False, "default_partition": 0})
    for result in results:
        if writes:
            assert isinstance(result, (FrameError, RemoteError)), result
            assert "kept a tensor that it was given or returned, and it was written to in place later" in str(result)
        else:
            assert isinstance(result, torch.Tensor), result
            torch.testing.assert_close(result, inputs * 2)
