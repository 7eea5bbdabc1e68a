"""Hooks on ``grad_fn`` itself: where that node is on another rank, they are refused, as they would never run."""

from __future__ import annotations

from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.errors import FrameError, RemoteError
from shardwright.job.runtime import Runtime
from torch import nn

from tests.frames.comparing import Part, assert_exact, data, run_divided, times_weight
from tests.frames.job import Job, job_fixture

METHODS = ["register_hook", "register_prehook"]

job = job_fixture(2)


def hooked(tensor: torch.Tensor, method: str) -> torch.Tensor:
    getattr(tensor.grad_fn, method)(lambda *_: None)
    return tensor


@pytest.mark.parametrize("method", METHODS)
def test_hook_on_the_node_of_a_result_is_refused(method: str) -> None:
    model = Part(lambda root, x: hooked(root.child(x * root.weight), method), child=Part(times_weight))
    with pytest.raises(FrameError, match=r"grad_fn of a result of module 'child'.*register_hook of the tensor"):
        run_divided(model, [data()])


@pytest.mark.parametrize("method", METHODS)
def test_hook_on_the_node_of_an_argument_is_refused(method: str) -> None:
    child = Part(lambda part, x: hooked(x, method) * part.weight)
    model = Part(lambda root, x: root.child(x * root.weight), child=child)
    with pytest.raises(FrameError, match="grad_fn of an argument of module 'child'"):
        run_divided(model, [data()])


@pytest.mark.parametrize("scale", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_hook_on_the_node_of_a_tensor_that_is_made_here_is_exact(method: str, scale: int) -> None:
    seen: list[torch.Tensor] = []

    def hook(*gradients: Any) -> Any:
        seen.append(gradients[-1][0].clone())
        return tuple(None if one is None else one * scale for one in gradients[0])

    def body(root: Part, x: torch.Tensor) -> Any:
        h = root.child(x * root.weight) + x
        getattr(h.grad_fn, method)(hook)
        return root.other(h) + h * h

    assert_exact(Part(body, child=Part(times_weight), other=Part(times_weight)), data())
    plain, divided = seen
    torch.testing.assert_close(plain, divided)


class Hooking(nn.Module):
    """Puts a hook on the node of a result whose values have not come, or have."""

    def __init__(self, method: str, *, used: bool) -> None:
        super().__init__()
        self.child = nn.Linear(3, 3)
        self.method, self.used = method, used

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.child(x)
        if self.used:
            float(y.detach().sum())
        return hooked(y, self.method) if y.requires_grad else y


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("used", [False, True])
def test_hook_on_the_node_of_a_result_is_refused_before_and_after_its_values_have_come(
    job: Job, method: str, used: bool
) -> None:
    def main(runtime: Runtime) -> BaseException:
        module = Hooking(method, used=used)
        smp.set_partition(module.child, 1)
        model = smp.DistributedModel(module)

        @smp.step
        def train(inputs: torch.Tensor) -> None:
            model.backward(model(inputs).sum())

        with pytest.raises((FrameError, RemoteError)) as caught:
            train(torch.ones(4, 3))
        return caught.value

    settings = {"microbatches": 2, "auto_partition": False, "default_partition": 0}
    for error in job.run(main, settings):
        assert "grad_fn of a result of module 'child'" in str(error)
