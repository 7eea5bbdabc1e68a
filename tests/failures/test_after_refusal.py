"""A step that is refused leaves nothing behind that the next one would stumble over."""

from __future__ import annotations

from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.errors import FrameError, RemoteError
from shardwright.job.runtime import Runtime
from torch import nn

from tests.frames.job import Job, job_fixture

job = job_fixture(2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.here, self.there = nn.Linear(3, 3), nn.Linear(3, 3)
        smp.set_partition(self.there, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.there(self.here(x))


def test_the_next_model_trains_after_a_first_step_that_was_refused(job: Job) -> None:
    def main(runtime: Runtime) -> Any:
        refused, model = smp.DistributedModel(Model()), smp.DistributedModel(Model())

        @smp.step
        def wrong(x: torch.Tensor) -> None:
            torch.autograd.grad(refused(x).sum(), [x])

        @smp.step
        def right(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).sum()
            model.backward(loss)
            return loss

        try:
            wrong(torch.ones(4, 3, requires_grad=True))
        except (FrameError, RemoteError) as error:
            return error, right(torch.ones(4, 3)).outputs
        return None

    results = job.run(main, {"microbatches": 2, "auto_partition": False, "default_partition": 0})
    assert job.sent()["forward"] == 2
    for result in results:
        assert isinstance(result, tuple), result
        error, losses = result
        assert "torch.autograd.grad in the code of the step function" in str(error)
        assert len(losses) == 2


class Picky(nn.Module):
    """A layer that refuses what is not a number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.isnan().any():
            raise ValueError("not a number")
        return self.linear(x)


class Forgiving(nn.Module):
    """A module that would do without its child where that raises."""

    def __init__(self, width: int, reached: list[str]) -> None:
        super().__init__()
        self.before, self.child = nn.Linear(width, width), Picky(width)
        self.reached = reached

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.before(x)
        try:
            h = self.child(h).tanh()
        except ValueError:
            self.reached.append("except")
        except Exception:
            self.reached.append("except Exception")
        return h


@pytest.mark.parametrize("size", [(8, 3), (80, 160)])
@pytest.mark.parametrize("owner", [0, 1])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_except_around_a_module_elsewhere_is_not_reached_and_the_next_step_is_exact(
    job: Job, steps_before: int, owner: int, size: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(size[1], size[1]), Forgiving(size[1], [])).double()
    good = torch.randn(*size, dtype=torch.float64)
    bad = good.clone()
    bad[-1, 0] = torch.nan  # in the last microbatch
    plain(good).square().mean().backward()

    def main(runtime: Runtime) -> tuple[Exception, list[str]]:
        reached: list[str] = []
        own = nn.Sequential(nn.Linear(size[1], size[1]), Forgiving(size[1], reached)).double()
        smp.set_partition(own[1], 1 - owner)
        smp.set_partition(own[1].child, owner)
        model = smp.DistributedModel(own)
        model.load_state_dict(plain.state_dict())

        @smp.step
        def train(x: torch.Tensor) -> None:
            model.backward(model(x).square().mean())

        for _ in range(steps_before):
            train(good)
        model.zero_grad()
        with pytest.raises((ValueError, RemoteError)) as caught:
            train(bad)
        train(good)
        for name, parameter in model.local_named_parameters():
            torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)
        return caught.value, reached

    settings = {"microbatches": 4, "auto_partition": False, "default_partition": 0}
    for rank, result in enumerate(job.run(main, settings)):
        assert isinstance(result, tuple), result
        error, reached = result
        assert reached == []
        if rank == owner:
            assert type(error) is ValueError
            assert str(error) == "not a number"
        else:
            assert isinstance(error, RemoteError)
            assert (error.rank, error.kind, error.message) == (owner, "ValueError", "not a number")
            assert (error.module, error.phase) == ("1.child", "forward")
