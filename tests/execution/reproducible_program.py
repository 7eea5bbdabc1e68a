"""One rank of a job that trains with dropout; prints losses and gradients, the same for every degree."""

from __future__ import annotations

import json
import sys
from typing import Any

import shardwright as smp
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

SAMPLES = 8


class Block(nn.Module):
    """Draws before, between and after its children, and in a child that draws nothing of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.4), nn.Linear(12, 12), nn.Dropout(0.2))
        self.second = nn.Linear(12, 12)
        self.attention = nn.MultiheadAttention(12, 2, dropout=0.3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.rand(())
        x = torch.dropout(self.first(x), 0.1, self.training) + self.second(x)
        return x + self.attention(x, x, x, need_weights=False)[0] * torch.rand(())


class Model(nn.Module):
    """Blocks, of which one is used twice and one is checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.tail = nn.Sequential(nn.Dropout(0.5), nn.Linear(12, 12), nn.Dropout(0.5), nn.Linear(12, 4))

    def forward(self, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        x = checkpoint(self.blocks[1], x, use_reentrant=reentrant)
        return self.tail(self.blocks[0](x))


@smp.step(non_split_inputs=["reentrant"])
def train(model: Any, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
    loss = (model(x * torch.rand(()), reentrant) + torch.rand(())).square().mean()
    model.backward(loss)
    return loss


def main() -> None:
    pp, microbatches, pins = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    smp.init(pipeline_parallel_degree=pp, microbatches=microbatches, ddp=True, reproducible_rng=True, seed=3)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    module = Model()
    model = smp.DistributedModel(module)
    for name, rank in pins.items():
        smp.set_partition(module.get_submodule(name), rank)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batch = torch.randn(2, SAMPLES, 5, 12, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(100 + smp.rank())  # neither counts
    torch.rand(smp.rank() + 1)
    losses: list[list[float]] = []
    for step, samples in enumerate(batch):
        optimizer.zero_grad()
        outputs = train(model, samples.chunk(smp.dp_size())[smp.dp_rank()], step == 1)
        losses.append([float(loss) for loss in outputs.outputs])
        optimizer.step()
    norms = {name: float(parameter.grad.norm()) for name, parameter in model.local_named_parameters()}
    print(json.dumps({"replica": smp.dp_rank(), "losses": losses, "norms": norms}), flush=True)


if __name__ == "__main__":
    main()
