"""One of two data-parallel ranks: steps that reduce no gradients fail on one of them, and both go on exactly."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import shardwright as smp
import torch
from torch import nn

MICROBATCHES = 2


@smp.step
def train(model, inputs, fails):
    loss = model(inputs).square().sum()
    if fails and smp.rank() == 1:
        raise ValueError("this replica's batch is bad")
    if torch.is_grad_enabled():
        model.backward(loss)
    return loss


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


@contextmanager
def failure_here_and_there() -> Iterator[None]:
    """The block's step fails on both ranks, each with an error that says whose it was."""
    with pytest.raises((ValueError, smp.RemoteError), match="this replica's batch is bad") as raised:
        yield
    assert isinstance(raised.value, ValueError) == (smp.rank() == 1), raised.value


def main() -> None:
    smp.init(microbatches=MICROBATCHES, ddp=True)
    torch.manual_seed(0)
    module = nn.Linear(6, 6).double()
    reference = copy.deepcopy(module)
    model = smp.DistributedModel(module, backward_passes_per_step=2)
    train(model, batch(0, smp.rank()), False)
    with failure_here_and_there():
        train(model, batch(1, smp.rank()), True)  # the pass that would reduce
    train(model, batch(2, smp.rank()), False)
    module.zero_grad()
    with failure_here_and_there():
        train(model, batch(3, smp.rank()), True)  # a pass that only accumulates
    with torch.no_grad(), failure_here_and_there():
        train(model, batch(4, smp.rank()), True)
    for step in (5, 6):
        train(model, batch(step, smp.rank()), False)
    for step in (5, 6):
        for rank in range(2):
            (reference(batch(step, rank)).square().sum() / (2 * MICROBATCHES)).backward()
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=0)
    print("exact after failures")


if __name__ == "__main__":
    main()
