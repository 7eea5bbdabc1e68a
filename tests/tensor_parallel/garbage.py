"""A rank of a job, 2 pipeline x 2 tensor-parallel ranks, in which only tp_rank 0 collects garbage.

``garbage.py MODE``: ``dynamic`` or ``fast``. Cycles keep a result that is on another rank, and a graph that leads to
no result.
"""

from __future__ import annotations

import gc
import sys

import shardwright as smp
import torch
from shardwright.nn.linear import DistributedLinear
from torch import nn

from tests.tensor_parallel.job import check_step

STEPS = 4
#: Below and above the size of tensors that travel inside messages.
WIDTHS = (8, 64)
SAMPLES = 16


def keep_in_cycle(value: torch.Tensor) -> None:
    """Refer to a value from garbage."""
    cycle: list[object] = [value]
    cycle.append(cycle)


class Detached(nn.Module):
    """A module to which no gradient comes back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with_graph = x.tanh()
        keep_in_cycle(with_graph)
        if smp.tp_rank() == 0:
            gc.collect()
        return with_graph.detach()


class Net(nn.Module):
    """Layers of which all but the first are on the other pipeline rank."""

    def __init__(self, width: int, linear: type[nn.Module]) -> None:
        super().__init__()
        self.own = linear(width, width)
        self.there = linear(width, width)
        self.behind = linear(width, width)
        self.detached = Detached()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.own(x).tanh()
        passed_on = self.there(hidden)
        result = self.behind(passed_on)
        keep_in_cycle(passed_on)
        return result + self.detached(hidden)


def make(width: int, linear: type[nn.Module]) -> Net:
    torch.manual_seed(3)
    return Net(width, linear)


def train(width: int, mode: str) -> None:
    smp.init(
        {
            "pipeline_parallel_degree": 2,
            "tensor_parallel_degree": 2,
            "ddp": True,
            "microbatches": 4,
            "auto_partition": False,
            "default_partition": 0,
            "static_mode": mode == "fast",
            "fast_mode": mode == "fast",
            "static_steps": 1,
        }
    )
    net, whole = make(width, DistributedLinear), make(width, nn.Linear)
    for module in (net.there, net.behind, net.detached):
        smp.set_partition(module, 1)
    model = smp.DistributedModel(net)

    @smp.step
    def run(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        if smp.tp_rank() == 0:
            gc.collect()
        return loss

    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        batches = torch.randn(smp.dp_size(), SAMPLES, width, generator=generator)
        check_step(model, whole, run, list(batches), f"step {step}")
    assert 0 < len(list(model.local_parameters())) < len(list(whole.parameters())), "the pipeline has divided nothing"
    print(f"exact with width {width}")
    smp.shutdown()


def main() -> None:
    torch.set_default_dtype(torch.float64)
    gc.collect()
    gc.disable()
    for width in WIDTHS:
        train(width, sys.argv[1])


if __name__ == "__main__":
    main()
