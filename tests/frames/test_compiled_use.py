"""Results of modules elsewhere that are used first in code which ``torch.compile`` compiles."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.execution import process
from shardwright.frames.watch import TensorMemory
from shardwright.job.runtime import Runtime
from torch import nn

from tests.frames.comparing import data
from tests.frames.job import Job, job_fixture

job = job_fixture(2)


@pytest.fixture
def ignored(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What Python raises where nobody sees it."""
    found: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", found.append)
    return found


@pytest.mark.parametrize("fast", [False, True])
def test_compiled_code_that_uses_a_result_first_is_exact_and_compiles_nothing_else(
    job: Job, fast: bool, ignored: list[Any]
) -> None:
    process.keep_device_guard()
    torch._dynamo.reset()
    torch.manual_seed(0)
    batch = data(4, 3)
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    compiled: list[str] = []

    def backend(graph: Any, example: Any) -> Any:
        compiled.append(str(graph.code))
        return graph.forward

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (y * x + y.sin()).square().mean()

    compiled_loss = torch.compile(loss, backend=backend)
    expected = torch.stack([loss(x, plain(x)) for x in batch.chunk(2)])
    expected.mean().backward()

    def main(runtime: Runtime) -> None:
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
        smp.set_partition(module[1], 1)
        model = smp.DistributedModel(module)
        model.load_state_dict(plain.state_dict())

        @smp.step
        def train(inputs: torch.Tensor) -> torch.Tensor:
            one = compiled_loss(inputs, model(inputs))
            model.backward(one)
            return one

        for _ in range(4):
            losses = train(batch)
            torch.testing.assert_close(losses.stack(), expected)
            for name, parameter in model.local_named_parameters():
                torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)
                parameter.grad = None

    settings = {"auto_partition": False, "default_partition": 0, "microbatches": 2, "static_steps": 1}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*Dynamo")
        assert job.run(main, settings | {"static_mode": True, "fast_mode": fast}) == [None, None]
    assert ignored == []
    assert compiled
    assert all("sin" in code or "square" in code for code in compiled), compiled


def test_memory_of_a_tensor_without_any_leaves_nothing_to_forget(ignored: list[Any]) -> None:
    with pytest.raises(NotImplementedError, match="storage"):
        TensorMemory(torch.eye(2).to_sparse())
    assert ignored == []
