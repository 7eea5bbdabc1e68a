"""A rank of a job whose parameters have hooks, beside plain DDP on the same ranks.

``parameter_hooks.py CONFIG DRAWS``: the configuration as JSON, and how many scripts are drawn.
"""

from __future__ import annotations

import functools
import json
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import shardwright as smp
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.data_parallel import drawn_hooks
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


def sharded(passes: int, on_all: bool) -> None:
    """With sharded data parallelism hooks see and change the mean, of sharded parameters and of whole ones."""
    plain, module = built(), built()
    model = smp.DistributedModel(module, backward_passes_per_step=passes)
    optimizer: Any = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    theirs: dict[str, list[torch.Tensor]] = {}
    ours: dict[str, list[torch.Tensor]] = {}

    def hook(values: dict[str, list[torch.Tensor]], module: nn.Module) -> None:
        def late(parameter: torch.Tensor, name: str) -> None:
            if on_all:
                values.setdefault(name, []).append(whole(parameter.grad))
                assert parameter.grad is not None
                parameter.grad.mul_(0.7)

        def early(gradient: torch.Tensor, name: str) -> torch.Tensor | None:
            if not on_all:  # putting shards together is for all ranks
                return None
            values.setdefault(f"early {name}", []).append(whole(gradient))
            return gradient * 0.5

        for name, parameter in module.named_parameters():
            parameter.register_hook(functools.partial(early, name=name))
            parameter.register_post_accumulate_grad_hook(functools.partial(late, name=name))

    hook(theirs, plain)
    if on_all or smp.rank() == 0:
        hook(ours, model.module)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in range(4):
        losses = [(plain(batch(number, replica)) - 0.3).square().mean() for replica in range(smp.dp_size())]
        (sum(losses) / smp.dp_size()).backward()
        train(model, batch(number, smp.dp_rank()))
        if number % 2:  # the hooks of every other step see gradients of the one before
            reference.step()
            optimizer.step()
            reference.zero_grad()
            optimizer.zero_grad(set_to_none=number > 1)
    for found, expected in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        close(found, expected, "weights")
    if on_all:
        assert ours.keys() == theirs.keys()
        for name, values in theirs.items():
            for number, (found, expected) in enumerate(zip(ours[name], values, strict=True)):
                close(found, expected, f"{name} in step {number}")


def whole(gradient: Any) -> torch.Tensor:
    found: torch.Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return found.detach().clone()


def kept() -> None:
    """With sharded optimizer state, hooks where gradients of earlier steps are kept, zeroed, or of no optimizer."""

    def shrink(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.7)

    for kind in ("early", "late"):
        plain, module = built(), built()
        model = smp.DistributedModel(module)
        first = [parameter for name, parameter in model.named_parameters() if not name.startswith("0")]
        optimizer: Any = smp.DistributedOptimizer(torch.optim.SGD(first, lr=0.1))
        reference = torch.optim.SGD(list(plain.parameters())[-len(first) :], lr=0.1)
        for parameter in (*plain.parameters(), *model.parameters()):
            if kind == "early":
                parameter.register_hook(lambda gradient: gradient * 0.7)
            else:
                parameter.register_post_accumulate_grad_hook(shrink)
        for number in range(4):
            losses = [(plain(batch(number, replica)) - 0.3).square().mean() for replica in range(smp.dp_size())]
            (sum(losses) / smp.dp_size()).backward()
            train(model, batch(number, smp.dp_rank()))
            if kind == "late" or number % 2:
                reference.step()
                optimizer.step()
                reference.zero_grad(set_to_none=False)
                optimizer.zero_grad(set_to_none=False)
        for found, expected in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
            close(found, expected, f"weights, {kind}")
        for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
            if all(found is not one for one in first):
                close(found.grad, expected.grad, f"gradients of no optimizer, {kind}")
        if kind == "late":
            train(model, batch(0, smp.dp_rank()))
            with pytest.raises(
                smp.ShardwrightError, match=r"post-accumulate-grad hook, which sees|on other ranks|failed"
            ):
                train(model, batch(1, smp.dp_rank()))
            optimizer.zero_grad()


def main() -> None:
    torch.set_default_dtype(torch.float64)
    config = json.loads(sys.argv[1])
    smp.init({"microbatches": MICROBATCHES, "ddp": True, **config})
    if "tensor_parallel_degree" in config:
        divided()
    elif "pipeline_parallel_degree" in config:
        pass  # drawn only
    elif "sharded_data_parallel_degree" in config:
        for passes in (1, PASSES):
            sharded(passes, True)
        sharded(1, False)
    else:
        as_ddp(1, "shard_optimizer_state" in config)
        if "shard_optimizer_state" not in config:
            as_ddp(PASSES, False)
        else:
            kept()
    for seed in range(int(sys.argv[2])):
        try:
            drawn_hooks.run(seed, config)
        except BaseException as error:
            error.add_note(f"seed {seed}: {drawn_hooks.draw(seed, config)}")
            raise
    smp.shutdown()
    print("all hold")


if __name__ == "__main__":
    main()
