"""One of the ranks of a job with two replicas: buffers in training and evaluation, beside DistributedDataParallel.

``evaluated_buffers.py CONFIG``: the configuration as JSON.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import shardwright as smp
import torch
from shardwright.data_parallel.replicas import Replicas
from torch import nn

WIDTH = 4


class Centred(nn.Linear):
    """A layer that subtracts a mean, which it moves whenever it trains, with gradients or without."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean(0)
        return super().forward(inputs - self.mean)


def built() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        Centred(), nn.BatchNorm1d(WIDTH, dtype=torch.float64), Centred(), nn.BatchNorm1d(WIDTH, dtype=torch.float64)
    )


@smp.step(microbatches=1)
def trained(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    loss = model(inputs).square().mean()
    model.backward(loss)
    return loss


@smp.step(microbatches=1)
def evaluated(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    return model(inputs).square().mean()


@smp.step(microbatches=1)
def broken(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    model(inputs)
    raise ValueError("on purpose")


def batch(number: int, replica: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + replica)
    return (1 + replica) * torch.randn(8, WIDTH, dtype=torch.float64, generator=generator) + replica


class Torch:
    """What DistributedDataParallel makes of two replicas, in one process."""

    def __init__(self) -> None:
        self.modules = [built(), built()]
        self.sync = True  # its `require_forward_param_sync`

    def run(self, number: int, kind: str, same: bool) -> list[float]:
        if self.sync:
            for first, other in zip(self.modules[0].buffers(), self.modules[1].buffers(), strict=True):
                other.copy_(first)
        losses = []
        for replica, module in enumerate(self.modules):
            module.train(kind != "evaluate")
            losses.append(module(batch(number, 0 if same else replica)).square().mean())
        self.sync = kind == "train"
        if self.sync:
            gradients = torch.autograd.grad(sum(losses) / 2, [p for m in self.modules for p in m.parameters()])
            half = len(gradients) // 2
            for module in self.modules:
                for parameter, one, other in zip(module.parameters(), gradients, gradients[half:], strict=False):
                    parameter.data -= 0.1 * (one + other)
        return [loss.item() for loss in losses]


@contextmanager
def broadcasts() -> Iterator[list[int]]:
    """Count the broadcasts of buffers before steps."""
    counts, share = [0], Replicas._share_buffers

    def counting(self: Replicas) -> None:
        counts[0] += 1
        share(self)

    with mock.patch.object(Replicas, "_share_buffers", counting):
        yield counts


def run(model: Any, optimizer: Any, number: int, kind: str, same: bool) -> float:
    inputs = batch(number, 0 if same else smp.dp_rank())
    model.train(kind != "evaluate")
    if kind == "train":
        optimizer.zero_grad()
        loss = trained(model, inputs).reduce_mean().item()
        optimizer.step()
        return float(loss)
    with torch.no_grad():
        return float(evaluated(model, inputs).reduce_mean().item())


def as_in_torch() -> None:
    """Every mixture of steps has the losses of DistributedDataParallel, and sends buffers no more often."""
    kinds = ["train", "train", "evaluate", "evaluate", "collect", "evaluate", "collect", "collect", "train", "evaluate"]
    kinds += ["train"]
    plain, net = Torch(), built()
    smp.set_partition(net[2], smp.pp_size() - 1)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for number, kind in enumerate(kinds):
        expected = plain.sync or kind == "train"
        if kind == "train" and not plain.sync:  # the library's step trains from the first replica's buffers always
            plain.sync = True
        with broadcasts() as counts:
            found = run(model, optimizer, number, kind, same=kind == "evaluate")
        wanted = plain.run(number, kind, same=kind == "evaluate")
        torch.testing.assert_close(found, wanted[smp.dp_rank()], rtol=1e-12, atol=1e-12, msg=f"step {number}: {kind}")
        if number:  # the first step of a pipeline divides the model
            assert counts == [int(expected)], (number, kind, counts)


def after_failures() -> None:
    """An evaluation that failed, and a verification, leave it to the next to take the first replica's buffers over."""
    plain, net = Torch(), built()
    smp.set_partition(net[2], smp.pp_size() - 1)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    averages = smp.AveragedModel(model, use_buffers=True)
    for number in range(2):
        run(model, optimizer, number, "train", same=False)
        plain.run(number, "train", same=False)
    averages.update_parameters()
    model.eval()
    with torch.no_grad():
        with pytest.raises((ValueError, smp.RemoteError), match="on purpose"):
            broken(model, batch(2, 0))
        with averages.applied():
            evaluated(model, batch(2, 0))
        report = smp.verify(evaluated, model, batch(2, smp.dp_rank()))
    assert report.exact, report
    found = run(model, optimizer, 2, "evaluate", same=True)
    torch.testing.assert_close(found, plain.run(2, "evaluate", same=True)[smp.dp_rank()], rtol=1e-12, atol=1e-12)


def ragged() -> None:
    """In a join, a replica without batches takes part in the evaluations of the other."""
    net = built()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with model.join():
        for number in range(2):
            run(model, optimizer, number, "train", same=False)
        before = copy.deepcopy(net)
        for number in range(2 + 2 * smp.dp_rank()):
            run(model, optimizer, number, "evaluate", same=False)
    for name, buffer in net.named_buffers():
        if smp.dp_rank() == 0:
            torch.testing.assert_close(buffer, dict(before.named_buffers())[name], rtol=0, atol=0)
    total = [buffer.sum().item() for buffer in net.buffers()]
    assert smp.allgather(total, smp.DP_GROUP) == [total, total]


def alone() -> None:
    """A replica that calls its model outside of steps waits for nobody, and has its own buffers."""
    net = built()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(2):
        run(model, optimizer, number, "train", same=False)
    own = copy.deepcopy(net).eval()
    model.eval()
    if smp.dp_rank() == 1:
        with torch.no_grad():
            assert torch.equal(model(batch(5, 1)), own(batch(5, 1)))
    smp.barrier()


def main() -> None:
    smp.init(json.loads(sys.argv[1]))
    as_in_torch()
    after_failures()
    if smp.pp_size() == 1:
        ragged()
        alone()
    print("buffers are shared")


if __name__ == "__main__":
    main()
