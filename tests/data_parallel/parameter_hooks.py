"""A rank of a job whose parameters have hooks, beside plain DDP on the same ranks.

``parameter_hooks.py CONFIG``: the configuration as JSON.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from typing import Any

import shardwright as smp
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.data_parallel.who_takes_part import MICROBATCHES, batch, built

PASSES = 2


@smp.step
def train(model: Any, inputs: torch.Tensor) -> None:
    model.backward((model(inputs) - 0.3).square().mean())


class Seen:
    """What hooks of a model's parameters see; one of them changes gradients, by another factor on each replica."""

    def __init__(self, module: nn.Module, changes: bool) -> None:
        self.values: dict[str, list[torch.Tensor]] = {}
        for name, parameter in module.named_parameters():
            parameter.register_hook(self._keeping(f"hook of {name}"))
            parameter.register_post_accumulate_grad_hook(self._after(f"post-accumulate hook of {name}", changes))

    def _keeping(self, what: str) -> Any:
        return lambda gradient: self.values.setdefault(what, []).append(gradient.detach().clone())

    def _after(self, what: str, changes: bool) -> Any:
        def hook(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            self.values.setdefault(what, []).append(parameter.grad.detach().clone())
            if changes:
                parameter.grad.mul_(1 + smp.dp_rank())

        return hook


def close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert float((found - expected).abs().max()) < 1e-12, what


def as_ddp(passes: int, shares: bool) -> None:
    """Hooks see what those of DDP see, this replica's gradient; what they leave is averaged."""
    plain = DistributedDataParallel(built(), process_group=smp.get_dp_process_group())
    model = smp.DistributedModel(built(), backward_passes_per_step=passes)
    optimizer: Any = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    theirs, ours = Seen(plain.module, not shares), Seen(model.module, not shares)
    for number in range(3 * passes):
        if number % passes == 0:
            plain.zero_grad()
            optimizer.zero_grad()
        inputs = batch(number, smp.dp_rank())
        with plain.no_sync() if (number + 1) % passes else nullcontext():
            (plain(inputs) - 0.3).square().mean().backward()
        train(model, inputs)
        if (number + 1) % passes == 0:
            for found, expected in zip(model.module.parameters(), plain.module.parameters(), strict=True):
                assert found.grad is not None or shares
                if found.grad is not None and not shares:
                    close(found.grad, expected.grad, f"gradient after step {number}")
    assert ours.values.keys() == theirs.values.keys()
    for what, values in theirs.values.items():
        assert len(values) == len(ours.values[what]) == 3 * passes, what
        for number, (found, expected) in enumerate(zip(ours.values[what], values, strict=True)):
            close(found, expected, f"{what} in step {number}")


def divided() -> None:
    """Of a parameter that is divided over tensor-parallel ranks, hooks see the mean over their samples."""
    module, plain = built(), built()
    smp.set_tensor_parallelism(module[2])
    model = smp.DistributedModel(module)
    ours = Seen(model.module, False)
    train(model, batch(0, smp.dp_rank()))
    for replica in range(smp.dp_size()):
        ((plain(batch(0, replica)) - 0.3).square().mean() / smp.dp_size()).backward()
    alone = built()
    (alone(batch(0, smp.dp_rank())) - 0.3).square().mean().backward()
    close(ours.values["hook of 0.weight"][0], alone[0].weight.grad, "of this rank's samples")
    assert float((alone[0].weight.grad - plain[0].weight.grad).abs().max()) > 1e-3
    sharding = model.placement.sharded.by_name()["2.weight"]
    part = sharding.shard(plain[2].weight.grad, smp.tp_rank(), smp.tp_size())
    close(ours.values["hook of 2.weight"][0], part, "of all samples of the group")


def main() -> None:
    torch.set_default_dtype(torch.float64)
    config = json.loads(sys.argv[1])
    smp.init({"microbatches": MICROBATCHES, "ddp": True, **config})
    if "tensor_parallel_degree" in config:
        divided()
    else:
        as_ddp(1, "shard_optimizer_state" in config)
        if "shard_optimizer_state" not in config:
            as_ddp(PASSES, False)
    smp.shutdown()
    print("all hold")


if __name__ == "__main__":
    main()
