"""Hooks of the division run once in every layout: where a model is whole on a rank, before its next computation."""

from __future__ import annotations

from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.job.runtime import Runtime
from torch import nn

from tests.frames.job import Job, in_process_ranks


@smp.step(microbatches=2)
def stepped(model: smp.DistributedModel, inputs: torch.Tensor) -> torch.Tensor:
    loss = model(inputs).square().mean()
    model.backward(loss)
    return loss


def _made() -> tuple[nn.Sequential, smp.DistributedModel, list[Any]]:
    net = nn.Sequential(*(nn.Linear(2, 2, dtype=torch.float64) for _ in range(2)))
    model, calls = smp.DistributedModel(net), []

    def fill(model: smp.DistributedModel, _: object) -> None:
        calls.append([float(one.detach().flatten()[0]) for one in model.local_parameters()])
        with torch.no_grad():
            for one in model.local_parameters():
                one.fill_(0.5)

    model.register_post_partition_hook(fill)
    return net, model, calls


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_hook_runs_in_the_first_step_after_loads_and_before_the_tasks(ranks: int) -> None:
    def main(runtime: Runtime) -> tuple[list[Any], float]:
        net, model, calls = _made()
        model.load_state_dict({name: torch.full_like(value, 3.0) for name, value in net.state_dict().items()})
        model.register_post_partition_hook(lambda *_: calls.append("second"))
        assert not calls
        inputs = torch.ones(4, 2, dtype=torch.float64)
        losses = [stepped(model, inputs).reduce_mean().item() for _ in range(2)]
        assert losses[0] == losses[1]
        return calls, losses[0]

    with in_process_ranks():
        job = Job(ranks)
        for calls, loss in job.run(main, {}, 60):
            assert calls[1:] == ["second"]
            assert set(calls[0]) == {3.0}
            assert loss == 4.0  # of weights and biases of 0.5, from inputs of 1: 1.5, then 2
        job.close()


def test_a_call_outside_of_steps_runs_it_before() -> None:
    def main(runtime: Runtime) -> float:
        _, model, calls = _made()
        with torch.no_grad():
            result = model(torch.ones(1, 2, dtype=torch.float64))
        assert len(calls) == 1
        return float(result[0, 0])

    with in_process_ranks():
        job = Job(1)
        assert job.run(main, {}, 60) == [2.0]
        job.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_hook_that_is_registered_after_the_first_step_runs_in_the_next(ranks: int) -> None:
    def main(runtime: Runtime) -> list[Any]:
        _, model, calls = _made()
        inputs = torch.ones(4, 2, dtype=torch.float64)
        stepped(model, inputs)
        model.register_post_partition_hook(lambda *_: calls.append("late"))
        for _ in range(2):
            stepped(model, inputs)
        return calls[1:]

    with in_process_ranks():
        job = Job(ranks)
        assert job.run(main, {}, 60) == [["late"]] * ranks
        job.close()
