"""Models and optimizers, with what shards can get wrong."""

from __future__ import annotations

from typing import Any

import shardwright as smp
import torch
from shardwright.job.runtime import current_runtime
from shardwright.sharded_data_parallel.parameters import ShardedParameters, shard_of
from torch import nn

from tests.optimizer_sharding.problems import MODELS, OPTIMIZERS, WIDTH, Reference, batch, groups_of, loss_of

TOLERANCE = 1e-10


class Experts(nn.Module):
    """Blocks of experts, of which a batch uses one, and replicas use different ones."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Expert() for _ in range(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = inputs + block(inputs)
        return inputs


class Expert(nn.Module):
    """A block that uses one of its experts, and one of them never."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        chosen = int(inputs.detach().abs().sum() * 1e3) % 3
        return torch.tanh(self.gate(inputs)) @ self.experts[chosen]


def blocks(number: int = 4, width: int = 32) -> nn.Sequential:
    """Blocks in a list, between two other layers."""
    inner = (nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)) for _ in range(number))
    return nn.Sequential(nn.Linear(WIDTH, width), *inner, nn.Linear(width, 5))


def built(name: str) -> nn.Module:
    """The model of a name, the same in every process."""
    torch.manual_seed(3)
    return {**MODELS, "experts": Experts, "blocks": blocks}[name]()


@smp.step
def train(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model(inputs))
    model.backward(loss)
    return loss


@smp.step
def predict(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(model(inputs))


def whole(parameter: torch.Tensor, value: torch.Tensor | None = None) -> torch.Tensor:
    """The whole of a parameter, or of something that is sharded as it is."""
    value = parameter.detach() if value is None else value
    registry = current_runtime()[ShardedParameters]
    return registry.whole(parameter, shard_of(value)) if registry.is_sharded(parameter) else value


def close(found: torch.Tensor | None, expected: torch.Tensor | None, what: str) -> None:
    """Compare two tensors, or None."""
    assert (found is None) == (expected is None), f"{what}: {found} and {expected}"
    if found is None or expected is None:
        return
    error = (found - expected).abs().max() / expected.abs().max().clamp_min(1e-3)
    assert float(error) < TOLERANCE, f"{what}: error {float(error)}"


class Pair:
    """A model over the ranks of the job, and the same in one process."""

    def __init__(self, model: str, optimizer: str = "adamw", **options: Any) -> None:
        make = OPTIMIZERS[optimizer]
        module = built(model)
        microbatches = int(current_runtime().place.cfg.microbatches)
        self.reference = Reference(module, make(groups_of(module.parameters())), smp.dp_size(), microbatches)
        mine = built(model)
        if smp.pp_size() > 1:
            halves = list(mine.children())
            for part in halves[len(halves) // 2 :]:
                smp.set_partition(part, 1)
            for part in halves[: len(halves) // 2]:
                smp.set_partition(part, 0)
        self.model = smp.DistributedModel(mine, **options)
        self.optimizer: Any = smp.DistributedOptimizer(make(groups_of(list(self.model.parameters()))))

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in (self.optimizer, self.reference.optimizer):
            optimizer.zero_grad(set_to_none=set_to_none)

    def train(self, step: int) -> None:
        train(self.model, batch(step, smp.dp_rank()))
        self.reference.accumulate(step)

    def step(self) -> None:
        self.optimizer.step()
        self.reference.optimizer.step()

    def run(self, steps: int, first: int = 0) -> None:
        for step in range(first, first + steps):
            self.zero_grad()
            self.train(step)
            self.check_gradients(f"step {step}")
            self.step()
            self.check(f"step {step}")

    def check_gradients(self, what: str) -> None:
        """Every gradient is that of one process, on each rank its shard."""
        expected = dict(self.reference.module.named_parameters())
        for name, parameter in self.model.local_named_parameters():
            gradient = parameter.grad
            found = None if gradient is None else whole(parameter, gradient)
            close(found, expected[name].grad, f"{what}: gradient of {name}")

    def check(self, what: str) -> None:
        """Every weight is that of one process, and enough of them are shards."""
        expected = dict(self.reference.module.named_parameters())
        found = dict(self.model.local_named_parameters())
        for name, parameter in found.items():
            close(whole(parameter), expected[name].detach(), f"{what}: {name}")
        assert any(map(current_runtime()[ShardedParameters].is_sharded, found.values())), "nothing is sharded"
        if smp.pp_size() > 1 and smp.pp_rank() == 0:
            assert smp.stats()["server"]["total"]["sent"]["forward"], "nothing crossed ranks"
