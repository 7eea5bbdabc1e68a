"""A rank of a job that changes between passes which parameters are trained, beside one process; drawn.

``who_takes_part.py CONFIG DRAWS``: the configuration as JSON, and how many scripts are drawn.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.model.sentinel import is_sentinel
from torch import nn

MICROBATCHES = 2
WIDTHS = (6, 8, 8, 4)


def built(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(5)
    layers: list[nn.Module] = []
    for inner, outer in itertools.pairwise(WIDTHS):
        layers += [nn.Linear(inner, outer, bias=bias), nn.Tanh()]
    return nn.Sequential(*layers)


@smp.step
def train(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    loss = (model(inputs) - 0.3).square().sum()
    if torch.is_grad_enabled():
        model.backward(loss)
    return loss


def batch(number: int, replica: int) -> torch.Tensor:
    return torch.randn(8, WIDTHS[0], generator=torch.Generator().manual_seed(100 * number + replica))


class RefusedError(Exception):
    """A script was refused on every rank, in these words."""


def on_all_ranks(call: Callable[[], object], *, at_once: bool = True) -> None:
    """Do what all ranks do.

    Args:
        call: What that is.
        at_once: Whether all ranks have to refuse it if one does; otherwise it is an edit that one rank makes.

    Raises:
        RefusedError: It was refused.
    """
    refusal = None
    try:
        call()
    except (smp.ShardwrightError, smp.RemoteError) as error:
        refusal = f"{type(error).__name__}: {error}"
    told = smp.allgather(refusal, smp.WORLD)
    if any(told):
        assert all(told) or not at_once, told
        raise RefusedError(next(filter(None, told)))


class Script:
    """What one script does to a model, distributed or not."""

    def __init__(self, module: Any, optimizer: Any, names: list[str]) -> None:
        self.module, self.optimizer, self.names = module, optimizer, names
        self.first = {name: self.parameter(name) for name in names}

    def parameter(self, name: str) -> Any:
        """The parameter, or None where a tensor-parallel rank has no part of it."""
        return dict(self.module.named_parameters()).get(name)

    def edit(self, what: str, name: str) -> None:
        parameter = self.parameter(name)
        if parameter is None:
            return
        if what in ("freeze", "unfreeze"):
            parameter.requires_grad_(what == "unfreeze")
        elif what == "drop":
            parameter.grad = None
        elif what == "replace" and not is_sentinel(parameter):  # which a rank has no values for
            path, _, last = name.rpartition(".")
            new = nn.Parameter(parameter.detach().clone())
            setattr(self.module.get_submodule(path), last, new)
            self.optimizer.add_param_group({"params": [new]})
        elif what == "out":
            for group in self.optimizer.param_groups:
                group["params"][:] = [one for one in group["params"] if one is not parameter]
        elif what == "hook" and parameter.requires_grad:
            parameter.register_hook(lambda gradient: 2 * gradient).remove()


def draw(seed: int, config: dict[str, Any], edits_groups: bool) -> tuple[int, list[list[list[tuple[str, str]]]]]:
    """The passes of an accumulation, and the edits before each pass of each accumulation."""
    numbers = random.Random(seed)
    names = [f"{number}.{kind}" for number in (0, 2, 4) for kind in ("weight", "bias")]
    words = ["freeze", "freeze", "unfreeze", "drop", "hook", "zero", "evaluate"]
    if edits_groups:
        words += ["replace", "out"]
    passes = numbers.choice([1, 2, 2, 3])
    edits = [
        [[(numbers.choice(words), numbers.choice(names)) for _ in range(numbers.randint(0, 2))] for _ in range(passes)]
        for _ in range(3)
    ]
    return passes, edits


def run(seed: int, config: dict[str, Any], edits_groups: bool) -> None:
    """Train by a drawn script and in one process; replaced parameters and edited groups may be refused, on all ranks.

    Raises:
        Refused: They are.
    """
    passes, accumulations = draw(seed, config, edits_groups)
    plain, module = built(), built()
    if "tensor_parallel_degree" in config:
        smp.set_tensor_parallelism(module[2])
    names = [name for name, _ in plain.named_parameters()]
    model = smp.DistributedModel(module, backward_passes_per_step=passes)
    optimizer: Any = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    ours = Script(model.module, optimizer, names)
    theirs = Script(plain, torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9), names)
    shards = "sharded_data_parallel_degree" in config or config.get("shard_optimizer_state")
    if ("pipeline_parallel_degree" in config or shards) and seed % 2:  # divided here, or in the first pass
        with torch.no_grad():
            train(model, batch(0, smp.dp_rank()))
    number = 0
    for edits in accumulations:
        for before in edits:
            number += 1
            for what, name in before:
                if what == "zero":
                    if not shards:  # in the middle of an accumulation
                        ours.optimizer.zero_grad()
                        theirs.optimizer.zero_grad()
                elif what == "evaluate":
                    with torch.no_grad():
                        on_all_ranks(functools.partial(train, model, batch(number, smp.dp_rank())))
                else:
                    theirs.edit(what, name)
                    on_all_ranks(functools.partial(ours.edit, what, name), at_once=False)
            if not any(one.requires_grad for one in plain.parameters()):
                theirs.edit("unfreeze", names[0])
                ours.edit("unfreeze", names[0])
            on_all_ranks(functools.partial(train, model, batch(number, smp.dp_rank())))
            for replica in range(smp.dp_size()):
                for part in batch(number, replica).chunk(MICROBATCHES):
                    ((plain(part) - 0.3).square().sum() / (MICROBATCHES * smp.dp_size())).backward()
        on_all_ranks(optimizer.step)
        theirs.optimizer.step()
        optimizer.zero_grad()
        theirs.optimizer.zero_grad()
        expected, found = plain.state_dict(), {}
        on_all_ranks(lambda found=found: found.update(model.state_dict()))
        for name in names:
            assert float((found[name] - expected[name]).abs().max()) <= 1e-12, name
        if set(config) <= {"ddp"}:
            for name in names:
                torch.testing.assert_close(ours.first[name].detach(), theirs.first[name].detach(), rtol=0, atol=1e-12)


def one_rank_alone() -> None:
    """A parameter that one rank freezes between passes is refused on all ranks; training goes on when they agree."""
    plain = built()
    model = smp.DistributedModel(built(), backward_passes_per_step=2)
    train(model, batch(0, smp.dp_rank()))
    weight = next(iter(model.parameters()))
    train(model, batch(1, smp.dp_rank()))
    model.zero_grad()
    weight.requires_grad_(smp.dp_rank() > 0)
    for _ in range(2):
        with pytest.raises((smp.ShardwrightError, smp.RemoteError), match="have to train the same parameters"):
            train(model, batch(2, smp.dp_rank()))
    weight.requires_grad_(True)
    for number in (2, 3):
        train(model, batch(number, smp.dp_rank()))
        for replica in range(smp.dp_size()):
            for part in batch(number, replica).chunk(MICROBATCHES):
                ((plain(part) - 0.3).square().sum() / (MICROBATCHES * smp.dp_size())).backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=1e-12)


def one_rank_alone_from_the_first_pass(passes: int, number: int) -> None:
    """The same before the first pass; a tensor-parallel rank is asked about what it has a part of, too."""
    module = built()
    if smp.tp_size() > 1:
        smp.set_tensor_parallelism(module[2])
    model = smp.DistributedModel(module, backward_passes_per_step=passes)
    weight = dict(model.module.named_parameters())[f"{number}.weight"]
    weight.requires_grad_(smp.rank() > 0)
    with pytest.raises((smp.ShardwrightError, smp.RemoteError), match="have to train the same parameters"):
        train(model, batch(0, smp.dp_rank()))
    weight.requires_grad_(True)
    train(model, batch(0, smp.dp_rank()))


def inside_a_step() -> None:
    """A parameter that is unfrozen while the step runs is refused: its gradient would not be reduced."""
    model = smp.DistributedModel(built())
    first = next(iter(model.parameters())).requires_grad_(False)

    @smp.step
    def unfreezing(model: Any, inputs: torch.Tensor) -> torch.Tensor:
        first.requires_grad_(True)
        loss = model(inputs).square().sum()
        model.backward(loss)
        return loss

    with pytest.raises((smp.ShardwrightError, smp.RemoteError), match=r"was frozen .* when the step began"):
        unfreezing(model, batch(0, smp.dp_rank()))


def main() -> None:
    torch.set_default_dtype(torch.float64)
    config = json.loads(sys.argv[1])
    smp.init({"microbatches": MICROBATCHES, "ddp": True, **config})
    refused = Counter[str]()
    for edits_groups in (False, True):
        for seed in range(int(sys.argv[2])):
            try:
                run(seed, config, edits_groups)
            except RefusedError as error:
                named = re.search(r"gradients of the last reduction|have to train the same parameters", str(error))
                if named is None or not edits_groups:
                    raise
                refused[named[0]] += 1
            except BaseException as error:
                error.add_note(f"seed {seed}: {draw(seed, config, edits_groups)}")
                raise
    assert refused.total() <= int(sys.argv[2]) / 2, refused
    if set(config) <= {"ddp"}:
        one_rank_alone()
        inside_a_step()
    if set(config) <= {"ddp", "tensor_parallel_degree"}:
        for passes in (1, 2):
            for number in (0, 2):
                one_rank_alone_from_the_first_pass(passes, number)
    smp.shutdown()
    print("all hold")


if __name__ == "__main__":
    main()
