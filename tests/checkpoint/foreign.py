"""Models that jobs and ``torch.distributed.checkpoint`` exchange: a function for each case."""

from __future__ import annotations

from typing import Any

import pytest
import shardwright as smp
import torch

from tests.checkpoint.exchanged import is_divided
from tests.checkpoint.models import Training
from tests.checkpoint.torch_program import STEPS, alone, batch, make, optimizer_of


@smp.step
def train_step(model: smp.DistributedModel, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    model.backward(loss)
    return loss


def training(seed: int) -> tuple[smp.DistributedModel, Any]:
    """The model of plain torch, in a job."""
    model = smp.DistributedModel(make(seed))
    return model, smp.DistributedOptimizer(optimizer_of(model))


def train(model: smp.DistributedModel, optimizer: Any, steps: range) -> None:
    """The steps that plain torch does."""
    for step in steps:
        optimizer.zero_grad()
        share = batch(step).chunk(smp.dp_size())[smp.dp_rank()]
        train_step(model, share)
        optimizer.step()


def check(model: smp.DistributedModel, steps: int) -> None:
    """Weights are those that one process has trained."""
    assert smp.pp_size() == 1 or is_divided(model)
    wanted = alone(steps).state_dict()
    found = model.state_dict()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=name)


def resume_foreign(folder: str, late: bool) -> None:
    """Go on from what plain torch has trained."""
    model, optimizer = training(9)
    if late:
        train(model, optimizer, range(1))
    content = smp.resume_from_checkpoint(folder)
    assert content["epoch"] == 3
    assert content["seen"]["names"] == ["a", "b"]
    assert torch.equal(content["seen"]["mean"], torch.ones(2))
    train(model, optimizer, range(STEPS, 2 * STEPS))
    check(model, 2 * STEPS)


def save_for_foreign(folder: str) -> None:
    """Train, and save."""
    model, optimizer = training(0)
    train(model, optimizer, range(STEPS))
    check(model, STEPS)
    smp.save_checkpoint(folder, "a", user_content={"epoch": 3, "seen": {"names": ["a", "b"], "mean": torch.ones(2)}})


def other_groups_are_refused(folder: str) -> None:
    """State of other parameter groups is not taken for that of these."""
    model = smp.DistributedModel(make(1))
    smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    with pytest.raises(smp.CheckpointError, match="the optimizer had 2 parameter groups, wanted 1"):
        smp.resume_from_checkpoint(folder)


def resume_content(folder: str) -> None:
    """Everything but the streams is as it was saved."""
    other = Training(seed=99)
    assert smp.resume_from_checkpoint(folder).keys() == other.content().keys()
    other.run(1)
