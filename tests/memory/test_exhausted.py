"""An error that memory ran out comes with the account of the rank, and with what would help."""

from __future__ import annotations

from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.memory.exhausted import is_out_of_memory
from torch import nn

from tests.frames.job import Job, job_fixture

job = job_fixture(2)


class Greedy(nn.Module):
    """A linear layer that allocates more than any machine has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.wants = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.wants:
            torch.empty(self.wants, dtype=torch.uint8)
        result: torch.Tensor = self.linear(x)
        return result


def test_the_rank_that_ran_out_says_so_on_every_rank(job: Job) -> None:
    nets = [nn.Sequential(nn.Linear(4, 4), Greedy()) for _ in range(2)]

    def main(runtime: Any) -> str:
        net = nets[runtime.place.rank]
        smp.set_partition(net[1], 1)
        model = smp.DistributedModel(net)

        @smp.step
        def train(x: torch.Tensor) -> None:
            model.backward(model(x).sum())

        train(torch.ones(4, 4))
        net[1].wants = 1 << 56
        try:
            train(torch.ones(4, 4))
        except Exception as error:
            return "\n".join([str(error), *getattr(error, "__notes__", [])])
        return "no error"

    given = {"auto_partition": False, "default_partition": 0, "microbatches": 4, "pipeline": "simple"}
    for text in job.run(main, given):
        assert "can't allocate memory" in text
        assert "Memory of rank 1" in text
        assert "predicted" in text
        assert "activations" in text
        assert '"pipeline_parallel_degree": 4' in text, text


def test_one_rank_explains_its_own_error() -> None:
    smp.init(microbatches=2)
    try:
        net = Greedy()
        model = smp.DistributedModel(net)

        @smp.step
        def train(x: torch.Tensor) -> None:
            model.backward(model(x).sum())

        train(torch.ones(4, 4))
        net.wants = 1 << 56
        with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
            train(torch.ones(4, 4))
        assert sum("Memory of rank 0" in note for note in caught.value.__notes__) == 1
    finally:
        smp.shutdown()


def test_an_update_that_runs_out_is_explained() -> None:
    class Greediest(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            torch.empty(1 << 56, dtype=torch.uint8)

    smp.init()
    try:
        model = smp.DistributedModel(nn.Linear(4, 4))
        optimizer = smp.DistributedOptimizer(Greediest(model.parameters(), lr=0.1))
        with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
            optimizer.step()
        assert any("Memory of rank 0" in note for note in caught.value.__notes__)
    finally:
        smp.shutdown()


def test_other_errors_are_let_alone() -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    assert not is_out_of_memory(ValueError("out of memory"))
