"""One rank of a job that trains drawn models with dropout, marked or not, between evaluations; prints the losses.

``masks_program.py PP TP PRESCALED COUNT``: the losses of each drawn program's training steps, of its own samples.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
from collections.abc import Callable
from typing import Any

import shardwright as smp
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, SAMPLES, STEPS, MICROBATCHES = 8, 8, 3, 4


class Block(nn.Module):
    """Draws between its layers, of which some may be divided."""

    def __init__(self, layers: list[nn.Module], run: Callable[..., Any]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.run(self.layers, nn.functional.dropout(x, 0.3, self.training))
        return x + nn.functional.dropout(self.last(hidden), 0.2, self.training)


RUNS: dict[str, Callable[..., Any]] = {
    "plainly": lambda module, x: module(x),
    "under torch's checkpoint": lambda module, x: checkpoint(module, x, use_reentrant=False),
    "under torch's reentrant checkpoint": lambda module, x: checkpoint(module, x, use_reentrant=True),
    "under the library's checkpoint": lambda module, x: smp.checkpoint(module, x),
}


def drawn_model(draw: random.Random) -> tuple[nn.Module, list[nn.Module]]:
    """A model and its modules to divide."""
    blocks: list[nn.Module] = []
    divided: list[nn.Module] = []
    for _ in range(draw.randint(2, 4)):
        layers: list[nn.Module] = []
        for _ in range(draw.randint(1, 4)):
            layers.append(draw.choice((nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4), nn.Tanh(), nn.LayerNorm(WIDTH))))
            if isinstance(layers[-1], nn.Linear | nn.LayerNorm) and draw.random() < 0.5:
                divided.append(layers[-1])
        blocks.append(Block(layers, RUNS[draw.choice(list(RUNS))]))
        if draw.random() < 0.3:
            divided.append(blocks[-1].last)
    return nn.Sequential(*blocks, nn.Dropout(0.2), nn.Linear(WIDTH, 1)), divided


@smp.step
def train(model: Any, x: torch.Tensor, fails: bool) -> torch.Tensor:
    loss = model(x).square().mean()
    if fails:
        raise ArithmeticError("as asked")
    model.backward(loss)
    return loss


@smp.step
def look(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def losses_of(program: int, *, divides: bool, looks: bool) -> list[list[float]]:
    """Train one drawn program; with ``looks``, there are evaluations and steps that fail in between."""
    draw, extra = random.Random(program), random.Random(f"{program} between")
    torch.manual_seed(program)
    module, divided = drawn_model(draw)
    if divides:
        for part in divided:
            smp.set_tensor_parallelism(part)
    model = smp.DistributedModel(module)
    shared = smp.state.cfg.prescaled_batch
    replicas, replica = (smp.rdp_size(), smp.rdp_rank()) if shared else (smp.dp_size(), smp.dp_rank())
    batches = torch.randn(STEPS, SAMPLES, WIDTH, generator=torch.Generator().manual_seed(program))
    losses = []
    for batch in batches:
        own = batch.chunk(replicas)[replica]
        for _ in range(extra.randint(0, 2) if looks else 0):
            if extra.random() < 0.3:
                with contextlib.suppress(ArithmeticError, smp.RemoteError):
                    train(model, own, True)
                continue
            model.train(extra.random() < 0.5)
            with torch.no_grad():
                look(model, own)
            model.train()
        model.zero_grad()
        losses.append([float(loss) for loss in train(model, own, False).outputs])
    return losses


def main() -> None:
    pp, tp, prescaled, count = (int(word) for word in sys.argv[1:])
    replicas = 1 if prescaled else tp
    torch.set_default_dtype(torch.float64)
    for program in range(count):
        for looks in (False, True):
            smp.init(
                pipeline_parallel_degree=pp,
                tensor_parallel_degree=tp,
                prescaled_batch=bool(prescaled),
                microbatches=MICROBATCHES // replicas,
                ddp=pp * tp > 1,
                reproducible_rng=True,
                seed=3,
            )
            found = losses_of(program, divides=tp > 1, looks=looks)
            row = {"program": program, "looks": looks, "rank": smp.rank(), "losses": found}
            smp.shutdown()
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
