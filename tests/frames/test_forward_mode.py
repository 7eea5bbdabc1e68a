"""Forward-mode differentiation beside results of modules elsewhere, of several microbatches that run side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.errors import FrameError, RemoteError
from shardwright.job.runtime import Runtime
from torch import nn
from torch.autograd import forward_ad

from tests.frames.comparing import data
from tests.frames.job import Job, job_fixture

STEPS = 4
#: A few numbers, and more than a message takes along.
SIZES = [(6, 3), (120, 160)]
MODES: list[dict[str, Any]] = [{}, {"static_mode": True}, {"static_mode": True, "fast_mode": True}]

job = job_fixture(2)


def of_the_result(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    value, tangent = torch.func.jvp(torch.sin, (y,), (torch.ones_like(y),))
    return value + 2 * tangent


def closed_over(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    value, tangent = torch.func.jvp(lambda given: given.sin() * y, (x,), (torch.ones_like(x),))
    return value + 2 * tangent


def jacobian(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.func.jacfwd(lambda given: given.sin() * y.sum())(x[0]).sum() + y


def of_a_gradient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    gradient = torch.func.grad(lambda given: (given.sin() * y).sum())
    return torch.func.jvp(gradient, (x,), (torch.ones_like(x),))[1]


def by_dual_tensors(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x)).sin() * y
        value, tangent = forward_ad.unpack_dual(dual)
        assert tangent is not None
        return value + 2 * tangent


def trained(
    job: Job, use: Callable[..., torch.Tensor], mode: dict[str, Any], size: tuple[int, int] = SIZES[0]
) -> list[Any]:
    torch.manual_seed(0)
    batch, width = data(*size), size[1]
    plain = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)).double()

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return use(x, y).square().mean()

    expected = torch.stack([loss(x, plain(x)) for x in batch.chunk(3)])
    expected.mean().backward()

    def main(runtime: Runtime) -> None:
        module = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)).double()
        smp.set_partition(module[1], 1)
        model = smp.DistributedModel(module)
        model.load_state_dict(plain.state_dict())

        @smp.step
        def train(inputs: torch.Tensor) -> torch.Tensor:
            one = loss(inputs, model(inputs))
            model.backward(one)
            return one

        for _ in range(STEPS):
            losses = train(batch)
            torch.testing.assert_close(losses.stack(), expected)
            for name, parameter in model.local_named_parameters():
                torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)
                parameter.grad = None

    settings = {"auto_partition": False, "default_partition": 0, "microbatches": 3, "static_steps": 1, **mode}
    return job.run(main, settings)


@pytest.mark.parametrize("mode", MODES, ids=" ".join)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("use", [of_the_result, closed_over, jacobian, of_a_gradient, by_dual_tensors])
def test_forward_mode_with_a_result_is_exact(
    job: Job, use: Callable[..., Any], mode: dict[str, Any], size: tuple[int, int]
) -> None:
    assert trained(job, use, mode, size) == [None, None]


@pytest.mark.parametrize("mode", MODES, ids=" ".join)
def test_a_wait_inside_forward_mode_is_refused(job: Job, mode: dict[str, Any]) -> None:
    """Of whoever has got torch's function before a job replaced it, as by an import of its name."""
    enter: Callable[[], int] = forward_ad.enter_dual_level._shardwright_original  # type: ignore[attr-defined]

    def use(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        enter()
        try:
            return x * y
        finally:
            forward_ad.exit_dual_level()

    root, other = trained(job, use, mode, SIZES[1])
    assert isinstance(root, FrameError)
    assert isinstance(other, RemoteError)
    for error in (root, other):
        assert "step function, microbatch" in str(error)
        assert "has to wait for another rank inside forward-mode differentiation" in str(error)
        assert "by clone()) before" in str(error)
