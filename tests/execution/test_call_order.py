"""Static mode where calls nest over ranks: whatever is asked for early, no call waits for a later one of the program."""

import copy
from collections.abc import Iterator

import pytest
import shardwright as smp
import torch
from shardwright.model.sentinel import is_sentinel
from shardwright.runtime import Runtime
from torch import nn

from tests.frames.job import Job, in_process_ranks

STATIC = {"static_mode": True, "fast_mode": True, "static_steps": 1}
STEPS = 4


class Node(nn.Module):
    """A module that calls others one after another, each with what the one before gave."""

    def __init__(self, width: int, called: list[nn.Module]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width, width) / width)
        self.called = nn.ModuleList(called)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for module in self.called:
            value = module(value)
        return (value @ self.weight).sigmoid()


class Start(nn.Module):
    """The module at the top, with a loss."""

    def __init__(self, called: list[nn.Module]) -> None:
        super().__init__()
        self.called = nn.ModuleList(called)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for module in self.called:
            value = module(value)
        return value.square().mean()


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    with in_process_ranks():
        made = Job(2)
        yield made
        made.close()


def compare(job: Job, model: nn.Module, places: dict[str, int], batch: torch.Tensor, microbatches: int) -> None:
    """Train a few steps in plain torch and over the ranks: the gradients have to be the same."""
    plain = copy.deepcopy(model)
    expected = []
    for _ in range(STEPS):
        plain.zero_grad()
        for part in batch.chunk(microbatches):
            plain(part).backward()
        expected.append({name: p.grad / microbatches for name, p in plain.named_parameters() if p.grad is not None})

    def main(runtime: Runtime) -> list[dict[str, torch.Tensor]]:
        module = copy.deepcopy(model)
        for name, rank in places.items():
            smp.set_partition(module.get_submodule(name), rank)
        divided = smp.DistributedModel(module)

        @smp.step
        def train(part: torch.Tensor) -> torch.Tensor:
            loss = divided(part)
            divided.backward(loss)
            return loss

        found = []
        for _ in range(STEPS):
            divided.zero_grad()
            train(batch)
            own = {name: p for name, p in module.named_parameters() if not is_sentinel(p)}
            found.append({name: p.grad.clone() for name, p in own.items() if p.grad is not None})
        return found

    settings = {"auto_partition": False, "default_partition": 0, "microbatches": microbatches}
    results = job.run(main, {**settings, **STATIC})
    for result in results:
        if isinstance(result, BaseException):
            raise result
    for step, wanted in enumerate(expected):
        found = {name: gradient for result in results for name, gradient in result[step].items()}
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12, msg=f"{name} in step {step}")
    assert job.rests


@pytest.mark.parametrize(("rows", "width"), [(2, 4), (40, 160)])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_later_call_of_a_module_does_not_hold_up_an_earlier_one(
    job: Job, rows: int, width: int, microbatches: int
) -> None:
    torch.manual_seed(3)
    last = Node(width, [])
    first = Node(width, [Node(width, []), Node(width, [last])])
    model = Start([first, Node(width, [last])]).double()
    places = {"called.0": 1, "called.0.called.0": 0, "called.0.called.1": 0, "called.0.called.1.called.0": 1}
    batch = torch.rand(rows * microbatches, width, dtype=torch.float64)
    compare(job, model, places, batch, microbatches)
