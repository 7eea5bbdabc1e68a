"""A model in plain torch, as others train it, without the library: ``WHAT FOLDER LAYOUT`` are its arguments."""

from __future__ import annotations

import gc
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

WIDTH, BATCH, STEPS = 48, 8, 3


class Tied(nn.Module):
    """Odd sizes, tied weights, a buffer, and tensors above 4 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, WIDTH)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
        self.last = nn.Linear(WIDTH, 7)
        self.again = nn.Linear(7, WIDTH)
        self.again.weight = self.first.weight
        self.register_buffer("offset", torch.randn(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.last(self.layers(self.first(x))) + self.offset
        return torch.as_tensor(self.last(torch.tanh(self.again(x))))


def make(seed: int = 0) -> Tied:
    """A model."""
    torch.manual_seed(seed)
    return Tied().double()


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """An optimizer with decay for weights alone."""
    named = list(model.named_parameters())
    groups = [
        {"params": [one for name, one in named if name.endswith("weight")], "weight_decay": 0.1},
        {"params": [one for name, one in named if not name.endswith("weight")], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def batch(step: int) -> torch.Tensor:
    """The inputs of a step, which every process knows."""
    return torch.randn(BATCH, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(100 + step))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Train as a job does."""
    for step in steps:
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()


def alone(steps: int) -> nn.Module:
    """What one process has trained, without an interruption."""
    model = make()
    train(model, optimizer_of(model), range(steps))
    return model


def save(folder: str, flat: bool) -> None:
    """Train with two processes and sharded parameters, and save."""
    model = make()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = optimizer_of(model)
    train(model, optimizer, range(STEPS))
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, state = get_state_dict(model, optimizer, options=options)
    content = {"model": weights, "optim": state, "epoch": 3, "seen": {"names": ["a", "b"], "mean": torch.ones(2)}}
    checkpoint.save(content, checkpoint_id=folder)


def go_on(folder: str, flat: bool) -> None:
    """Load what a job has saved, train on, and compare with what one process has trained."""
    model = make(seed=5)
    optimizer = optimizer_of(model)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, state = get_state_dict(model, optimizer, options=options)
    content = {"model": weights, "optim": state}
    checkpoint.load(content, checkpoint_id=folder, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=options)
    train(model, optimizer, range(STEPS, 2 * STEPS))
    for (name, found), wanted in zip(model.named_parameters(), alone(2 * STEPS).parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12, msg=name)


def main() -> None:
    torch.set_num_threads(1)
    what, folder, flat = sys.argv[1], sys.argv[2], sys.argv[3] == "flat"
    if what == "save":
        dist.init_process_group(
            "gloo", rank=int(os.environ["RANK"]), world_size=2, store=dist.FileStore(f"{folder}.store", 2)
        )
        save(folder, flat)
        gc.collect()  # cycles keep the group, whose threads would call into an interpreter that is ending
        dist.destroy_process_group()
    else:
        go_on(folder, flat)
    assert "shardwright" not in sys.modules


if __name__ == "__main__":
    main()
