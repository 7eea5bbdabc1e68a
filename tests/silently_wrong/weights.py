"""Weights and gradients outside a step: clipping, copies, averages."""

from __future__ import annotations

import copy
from typing import Any

import shardwright as smp
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_ as imported_clip
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from tests.silently_wrong.scenario import (
    Exact,
    compare_gradients,
    differences,
    divided,
    plain_step,
    scenario,
    square,
    step_of,
    train_both,
)
from tests.silently_wrong.stages import WIDTH, Layer, TwoStages, batch


def _trained() -> tuple[Any, nn.Module]:
    plain = TwoStages()
    model = divided(copy.deepcopy(plain))
    train_both(model, plain)
    return model, plain


@scenario
def torch_clips_all_parameters() -> Any:
    model, _ = _trained()
    return float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3))


@scenario
def torch_clips_local_parameters() -> Any:
    model, _ = _trained()
    return float(torch.nn.utils.clip_grad_norm_(list(model.local_parameters()), 1e-3))


@scenario
def clipping_imported_by_name() -> Any:
    model, _ = _trained()
    return float(imported_clip(model.parameters(), 1e-3))


@scenario
def clipping_local_parameters_imported_by_name() -> Any:
    model, _ = _trained()
    return float(imported_clip(list(model.local_parameters()), 1e-3))


@scenario
def the_norm_of_local_gradients_by_torch() -> Any:
    model, _ = _trained()
    gradients = [parameter.grad for parameter in model.local_parameters() if parameter.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients))


@scenario
def torch_clips_something_else() -> Any:
    model, plain = _trained()
    other = nn.Linear(3, 3)
    other(torch.ones(1, 3)).sum().backward()
    torch.nn.utils.clip_grad_norm_(other.parameters(), 1e-3)
    return compare_gradients(model, plain)


@scenario
def smp_clips() -> Any:
    model, plain = _trained()
    norm = smp.clip_grad_norm_(model.parameters(), 1e-3)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-3))
    return compare_gradients(model, plain)


@scenario
def a_deep_copy_after_the_partition() -> Any:
    model, _ = _trained()
    copy.deepcopy(model)
    return "nothing"


@scenario
def a_deep_copy_before_the_partition() -> Any:
    copy.deepcopy(divided(TwoStages()))
    return "nothing"


def _averaged(**how: Any) -> Any:
    """Three steps of SGD, averaged after each, on both; compares the averages, and what they predict."""
    plain = Normalized()
    model = divided(copy.deepcopy(plain))
    model.train()
    mine, theirs = smp.AveragedModel(model, **how), AveragedModel(plain, **how)
    before = model.module.here.linear.weight
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    whole = torch.optim.SGD(plain.parameters(), lr=0.1)
    step = step_of()

    @smp.step
    def predict(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model(x)

    for seed in range(3):
        optimizer.zero_grad()
        whole.zero_grad()
        step(model, batch(seed))
        plain_step(plain, batch(seed), square)
        optimizer.step()
        whole.step()
        mine.update_parameters()
        theirs.update_parameters(plain)
    found, expected = mine.state_dict(), theirs.state_dict()
    assert list(found) == list(expected)
    worst = differences(found, expected)
    AveragedModel(Normalized(), **how).load_state_dict(found)
    theirs.eval()
    with mine.applied() as averaged, torch.no_grad():
        averaged.eval()
        torch.testing.assert_close(predict(averaged, batch()).concat(), theirs(batch()))
    model.train()
    assert model.module.here.linear.weight is before or smp.pp_rank() == 1
    weights = differences(model.state_dict(), plain.state_dict())
    again = smp.AveragedModel(model, **how)
    again.load_state_dict(mine.local_state_dict())
    assert int(again.n_averaged) == 3
    again.update_parameters()
    theirs.update_parameters(plain)
    updated = differences(again.state_dict(), theirs.state_dict())
    return Exact(max(worst.worst, weights.worst, updated.worst), worst.compared)


class Normalized(nn.Module):
    """Two stages with buffers on both."""

    def __init__(self) -> None:
        super().__init__()
        self.here, self.one = Layer(), nn.BatchNorm1d(WIDTH)
        self.there = nn.Sequential(Layer(), nn.BatchNorm1d(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.there(self.one(self.here(x)))


@scenario
def equal_averages_of_smp() -> Any:
    return _averaged()


@scenario
def exponential_averages_of_smp() -> Any:
    return _averaged(multi_avg_fn=get_ema_multi_avg_fn(0.9))


@scenario
def averages_of_buffers_of_smp() -> Any:
    return _averaged(avg_fn=get_ema_avg_fn(0.5), use_buffers=True)


@scenario
def averaged_model_of_torch() -> Any:
    model, _ = _trained()
    AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    return "nothing"


@scenario
def averaged_model_of_torch_before_the_partition() -> Any:
    AveragedModel(divided(TwoStages()))
    return "nothing"


@scenario
def averaged_model_of_torch_of_the_inner_module() -> Any:
    model, _ = _trained()
    AveragedModel(model.module)
    return "nothing"
