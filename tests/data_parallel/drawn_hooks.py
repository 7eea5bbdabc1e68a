"""Drawn hooks of parameters, which read, write and raise, over replicas in every layout; beside plain DDP."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.model.sentinel import is_sentinel
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.data_parallel.who_takes_part import MICROBATCHES, WIDTHS, batch, built, train

STEPS = 3
NAMES = [f"{2 * number}.{kind}" for number in range(len(WIDTHS) - 1) for kind in ("weight", "bias")]


@dataclass(frozen=True)
class Hook:
    """One that is registered: before (``early``) or after a gradient is accumulated; changes it by these factors."""

    name: str
    early: bool
    factor: float
    by_replica: float
    removed: bool


@dataclass
class Script:
    """What is drawn: passes of an accumulation, hooks, and at which pass which of them raises on which replica."""

    passes: int
    hooks: list[Hook]
    raises: dict[int, tuple[int, int]] = field(default_factory=dict)


def draw(seed: int, config: dict[str, Any]) -> Script:
    numbers = random.Random(seed)
    passes = numbers.choice([1, 2]) if set(config) <= {"ddp", "pipeline_parallel_degree"} else 1
    hooks = []
    for _ in range(numbers.randint(1, 6)):
        name, early, factor = numbers.choice(NAMES), numbers.random() < 0.5, numbers.choice([1.0, 1.0, 0.5, -2.0])
        # Where hooks see means, a part each, all ranks change theirs alike.
        alike = "sharded_data_parallel_degree" in config or ("tensor_parallel_degree" in config and name[0] == "2")
        hooks.append(Hook(name, early, factor, 0.0 if alike else numbers.choice([0.0, 0.5]), numbers.random() < 0.2))
    # Of a divided layer a rank may have no part of the bias.
    kept = [number for number, hook in enumerate(hooks) if not hook.removed and hook.name != "2.bias"]
    raises = {}
    if kept and numbers.random() < 0.5:
        raises[numbers.randrange(STEPS * passes)] = (numbers.choice(kept), numbers.randrange(2))
    return Script(passes, hooks, raises)


class Hooked:
    """A module with the hooks of a script, and what they have seen: of each, a gradient for each pass."""

    def __init__(self, module: nn.Module, script: Script, replica: int) -> None:
        self.seen: list[list[Any]] = [[] for _ in script.hooks]
        self.raising: tuple[int, int] | None = None
        self.replica = replica
        parameters = dict(module.named_parameters())
        for number, hook in enumerate(script.hooks):
            if (parameter := parameters.get(hook.name)) is None or is_sentinel(parameter):
                continue
            if hook.early:
                handle = parameter.register_hook(self._early(number, hook))
            else:
                handle = parameter.register_post_accumulate_grad_hook(self._late(number, hook))
            if hook.removed:
                handle.remove()

    def see(self, number: int, hook: Hook, gradient: Any) -> float:
        """Keep what is seen, or raise; return what it is multiplied by."""
        if self.raising == (number, self.replica):
            raise ArithmeticError("as drawn")
        self.seen[number].append(gradient.detach().clone())
        return hook.factor + hook.by_replica * self.replica

    def _early(self, number: int, hook: Hook) -> Any:
        def early(gradient: Any) -> Any:
            factor = self.see(number, hook, gradient)
            return None if factor == 1.0 else gradient * factor

        return early

    def _late(self, number: int, hook: Hook) -> Any:
        def late(parameter: Any) -> None:
            factor = self.see(number, hook, parameter.grad)
            if factor != 1.0:
                parameter.grad.mul_(factor)

        return late


class Mean:
    """One process in which hooks see the mean over replicas, or of parameters that are not shared a replica's own."""

    def __init__(self, script: Script, shared: set[str]) -> None:
        """Let hooks see the mean of the parameters that are ``shared``."""
        self.module, self.shared = built(), shared
        self.replicas = [built() for _ in range(smp.dp_size())]
        self.hooked = [Hooked(each, script, number) for number, each in enumerate(self.replicas)]

    def run(self, number: int) -> None:
        """Compute what all replicas do, one after another."""
        gradients = []
        for replica in range(len(self.replicas)):
            loss = (self.module(batch(number, replica)) - 0.3).square().sum() / MICROBATCHES
            gradients.append(torch.autograd.grad(loss, list(self.module.parameters())))
        means = [sum(each) / len(each) for each in zip(*gradients, strict=True)]
        for replica, module in enumerate(self.replicas):
            module.zero_grad()
            for (name, parameter), own, mean in zip(module.named_parameters(), gradients[replica], means, strict=True):
                (parameter * (mean if name in self.shared else own)).sum().backward()
        for name, parameter in self.module.named_parameters():
            each = [dict(module.named_parameters())[name].grad for module in self.replicas]
            parameter.grad = each[smp.dp_rank()] if name in self.shared else sum(each) / len(each)


def run(seed: int, config: dict[str, Any]) -> None:
    """Train as a drawn script does, beside plain DDP, or beside one process where hooks see means over replicas."""
    script = draw(seed, config)
    module = built()
    if "tensor_parallel_degree" in config:
        smp.set_tensor_parallelism(module[2])
    model = smp.DistributedModel(module, backward_passes_per_step=script.passes)
    optimizer: Any = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    with torch.no_grad():
        train(model, batch(0, smp.dp_rank()))  # hooks are registered when it is divided
    ours = Hooked(model.module, script, smp.dp_rank())
    parts = model.placement.sharded.by_name() if "tensor_parallel_degree" in config else {}
    plain: Any
    if parts or "sharded_data_parallel_degree" in config:
        plain = Mean(script, set(parts or NAMES))
        theirs = plain.hooked[smp.dp_rank()]
    else:
        plain = DistributedDataParallel(built(), process_group=smp.get_dp_process_group())
        theirs = Hooked(plain.module, script, smp.dp_rank())
    reference = torch.optim.SGD(plain.module.parameters(), lr=0.05)
    for number in range(STEPS * script.passes):
        is_last = (number + 1) % script.passes == 0
        if number in script.raises:
            ours.raising, before = script.raises[number], [len(each) for each in ours.seen]
            with pytest.raises((ArithmeticError, smp.ShardwrightError)):
                train(model, batch(number, smp.dp_rank()))
            ours.raising = None
            for each, count in zip(ours.seen, before, strict=True):
                del each[count:]
        train(model, batch(number, smp.dp_rank()))
        if isinstance(plain, Mean):
            plain.run(number)
        else:
            with nullcontext() if is_last else plain.no_sync():
                ((plain(batch(number, smp.dp_rank())) - 0.3).square().sum() / MICROBATCHES).backward()
        if is_last:
            for each in (optimizer, reference):
                each.step()
                each.zero_grad()
    held = {name for name, one in model.module.named_parameters() if not is_sentinel(one)}
    for hook, found, expected in zip(script.hooks, ours.seen, theirs.seen, strict=True):
        assert len(found) == (len(expected) if hook.name in held else 0), hook
        for one, other in zip(found, expected, strict=False):
            if hook.name in parts:
                other = parts[hook.name].shard(other, smp.tp_rank(), smp.tp_size())
            close(one, other, hook)
    weights = model.state_dict()
    for name, expected in plain.module.state_dict().items():
        close(weights[name], expected, name)


def close(found: Any, expected: torch.Tensor, what: Any) -> None:
    found = found.full_tensor() if hasattr(found, "full_tensor") else found
    assert float((found.detach() - expected).abs().max()) <= 1e-11, what
