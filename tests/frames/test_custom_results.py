"""Modules that give an argument back through a function of several results, as hooks on modules make them."""

import copy

import pytest
import shardwright as smp
import torch
from shardwright.job.runtime import Runtime
from shardwright.model.sentinel import is_sentinel
from torch import nn

from tests.frames.job import Job, job_fixture

job = job_fixture(2)


class GivesBack(nn.Module):
    """Returns its arguments, through a hook that changes their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.register_full_backward_hook(_scaled)

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return one, other, other


def _scaled(
    _module: nn.Module, given: tuple[torch.Tensor | None, ...], _wanted: object
) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if gradient is None else gradient * 0.9 for gradient in given)


class Around(nn.Module):
    """Calls it, and returns one of its results or a part of that."""

    def __init__(self, *, sliced: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))
        self.inner = GivesBack()
        self.sliced = sliced

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, result, _ = self.inner(x * self.weight, x)
        return result[:2] if self.sliced else result


class Whole(nn.Module):
    """A layer before it."""

    def __init__(self, *, sliced: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.around = Around(sliced=sliced)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.around(self.first(x))


@pytest.mark.parametrize("rows", [4, 400])
@pytest.mark.parametrize("sliced", [False, True])
def test_gradients_pass_the_hook_of_a_module_that_returns_its_argument(job: Job, sliced: bool, rows: int) -> None:
    torch.manual_seed(0)
    whole, inputs = Whole(sliced=sliced).double(), torch.randn(rows, 8, dtype=torch.float64)

    def main(runtime: Runtime) -> dict[str, torch.Tensor | None]:
        module = copy.deepcopy(whole)
        smp.set_partition(module.around, 1)
        model = smp.DistributedModel(module)

        @smp.step
        def train(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().sum()
            model.backward(loss)
            return loss

        train(inputs)
        return {name: p.grad for name, p in module.named_parameters() if not is_sentinel(p)}

    results = job.run(main, {"auto_partition": False, "default_partition": 0, "microbatches": 1})
    found: dict[str, torch.Tensor | None] = {}
    for result in results:
        assert not isinstance(result, BaseException), result
        found |= result
    whole(inputs).square().sum().backward()
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-10, atol=1e-12)
