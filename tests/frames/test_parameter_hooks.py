"""A step takes the hooks of parameters off, and runs them once on the whole gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shardwright.model.buffers import SavedBuffers
from shardwright.model.hooks import DeferredLoads
from shardwright.model.sentinel import Sentinel, is_sentinel, release
from shardwright.step.transaction import StepTransaction

from tests.frames.comparing import Part, data, times_weight, weighted_sum
from tests.frames.loopback import LoopbackJob, guarded


class FakePlacement:
    """What a transaction asks of a placement."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.replicas = self
        self.buffers = SavedBuffers()
        self.deferred_loads = DeferredLoads()
        self.averages_microbatches = True

    def owned_tensors(self) -> Any:
        return list(self.module.parameters()), []

    def over_rdp(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        return []

    def sharded_earlier(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Nothing is sharded."""


def begun(module: torch.nn.Module) -> StepTransaction:
    """The transaction of a step that has begun."""
    transaction = StepTransaction([FakePlacement(module)])  # type: ignore[list-item]
    transaction.begin()
    return transaction


def commit(transaction: StepTransaction, microbatches: int) -> None:
    """Let the step succeed."""
    transaction.average(microbatches, 1)
    transaction.prepare(in_place=True)
    transaction.finish()


def test_parameter_hooks_run_once_per_step_on_its_whole_gradient() -> None:
    model = Part(lambda m, x: m.child(x * m.weight) * m.weight, child=Part(times_weight))
    plain = Part(lambda m, x: m.child(x * m.weight) * m.weight, child=Part(times_weight))
    plain.load_state_dict(model.state_dict())
    seen: dict[str, list[torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: seen.setdefault(name, []).append(gradient.clone()))
        parameter.register_post_accumulate_grad_hook(
            lambda parameter, name=name: seen.setdefault("post " + name, []).append(parameter.grad.clone())
        )
    transaction = begun(model)
    job = LoopbackJob(model, lambda name: int("child" in name))
    microbatches = [data(), data()]
    own = torch.Tensor.register_hook
    with guarded():
        assert torch.Tensor.register_hook is not own
        for number, x in enumerate(microbatches):
            job.run(lambda backward, x=x: backward(weighted_sum(model(x))), number)
    commit(transaction, 2)
    for x in microbatches:
        (weighted_sum(plain(x)) / 2).backward()
    for name, parameter in plain.named_parameters():
        for key in (name, "post " + name):
            (gradient,) = seen[key]
            torch.testing.assert_close(gradient, parameter.grad)
    assert torch.Tensor.register_hook is own


@pytest.mark.parametrize("fails", [False, True])
def test_parameter_given_up_in_a_step_keeps_no_hooks_and_no_gradient_here(fails: bool) -> None:
    """The first step divides the model, after its transaction has taken hooks and gradients off."""
    model = Part(times_weight)
    weight = model.weight
    weight.grad = torch.ones_like(weight)
    weight.register_hook(lambda gradient: gradient * 2)
    weight.register_post_accumulate_grad_hook(lambda parameter: None)
    transaction = begun(model)
    release(weight, Sentinel(weight, name="weight", owner=1, is_parameter=True))
    transaction.rollback() if fails else commit(transaction, 1)
    assert is_sentinel(weight)
    assert weight.grad is None
