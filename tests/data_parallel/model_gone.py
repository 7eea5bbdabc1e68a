"""Two data-parallel ranks: rank 0 keeps a trained model that rank 1 has let go of, and both train another one."""

import gc

import pytest
import shardwright as smp
import torch
from torch import nn


@smp.step
def train(model, inputs):
    loss = model(inputs).square().sum()
    model.backward(loss)
    return loss


@smp.step
def train_both(one, other, inputs):
    one.backward(one(inputs).sum())
    if other is not None:
        other.backward(other(inputs).sum())


def main() -> None:
    smp.init(microbatches=2, ddp=True)
    torch.manual_seed(0)
    old = smp.DistributedModel(nn.Linear(3, 3))
    inputs = torch.ones(4, 3) * (1 + smp.rank())
    train(old, inputs)
    new = smp.DistributedModel(nn.Linear(3, 1))
    train(new, inputs)
    if smp.rank() == 1:
        del old
        gc.collect()
    for _ in range(2):
        new.zero_grad()
        train(new, inputs)
        assert torch.equal(next(new.parameters()).grad, seen(inputs, new)), "the mean over both ranks"
    kept = old if smp.rank() == 0 else None
    with pytest.raises((smp.ShardwrightError, smp.RemoteError), match="was trained on rank 0, but not all data"):
        train_both(new, kept, inputs)
    new.zero_grad()
    train(new, inputs)
    print("gone and done")


def seen(inputs: torch.Tensor, model: smp.DistributedModel) -> torch.Tensor:
    """The gradient of both ranks' inputs in one process, as the mean over ranks and microbatches."""
    weight = next(model.parameters()).detach().clone().requires_grad_()
    bias = list(model.parameters())[1].detach()
    for scale in (1, 2):
        for half in (torch.ones(4, 3) * scale).chunk(2):
            (nn.functional.linear(half, weight, bias).square().sum() / 4).backward()
    return weight.grad


if __name__ == "__main__":
    main()
