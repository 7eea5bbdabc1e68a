"""A rank of a job with tensor, pipeline and data parallelism: trains, and compares each step with one process.

``job.py PP TP SCENARIO...``; the world size gives the rest. Each scenario is a job of its own in the same processes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import shardwright as smp
import torch
from shardwright.nn.linear import DistributedLinear
from shardwright.tensor_parallel.group import current_tensor_group
from shardwright.tensor_parallel.module import ShardedTensors
from torch import nn

STEPS = 5
SAMPLES = 4
WIDTH = 8


class Block(nn.Module):
    """A layer that is divided between two that are not, on samples of one rank's own."""

    def __init__(self, *, divided: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.divided = DistributedLinear(WIDTH, WIDTH) if divided else nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.delay = 0.0
        self.skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.delay:
            time.sleep(self.delay * float(torch.rand(())))
        hidden = self.first(x).tanh()
        if not self.skips:
            hidden = self.divided(hidden).tanh()
        return x + self.last(hidden)


def make(*, divided: bool) -> nn.Sequential:
    torch.manual_seed(11)
    return nn.Sequential(*(Block(divided=divided) for _ in range(4)))


def data(step: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A replica's own batch."""
    generator = torch.Generator().manual_seed(1000 * step + replica)
    x, y = torch.randn(2, SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    return x, y


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def compare(model: smp.DistributedModel, whole: nn.Module, what: str) -> float:
    """Hold gradients and values of this rank's own parameters against those of the whole model."""
    expected = dict(whole.named_parameters())
    shardings = ShardedTensors(model.module).by_name()
    group = current_tensor_group()
    worst = 0.0
    for name, parameter in model.local_named_parameters():
        for kind, mine, theirs in (
            ("gradient", parameter.grad, expected[name].grad),
            ("value", parameter.detach(), expected[name].detach()),
        ):
            if name in shardings:
                theirs = shardings[name].shard(theirs, group.rank, group.size)
            found = error(mine, theirs)
            assert found < 1e-10, f"{what}: {kind} of {name} is off by {found}"
            worst = max(worst, found)
    return worst


def start(**keys: Any) -> None:
    """Begin a job of 2 pipeline x 2 tensor-parallel ranks, where what is not placed is on the first pipeline rank."""
    torch.set_default_dtype(torch.float64)
    smp.init(
        {
            "pipeline_parallel_degree": 2,
            "tensor_parallel_degree": 2,
            "ddp": True,
            "microbatches": 2,
            "auto_partition": False,
            "default_partition": 0,
            **keys,
        }
    )


def mean_square(values: torch.Tensor) -> torch.Tensor:
    """The mean of the squares; zero for no values."""
    return values.square().sum() / max(values.numel(), 1)


def check_step(
    model: smp.DistributedModel,
    whole: nn.Module,
    step: Callable[[torch.Tensor], smp.StepOutput],
    batches: Sequence[torch.Tensor],
    what: str,
) -> None:
    """Train a step on the batch of each data-parallel rank, and hold loss and gradients against one process on all."""
    model.zero_grad()
    whole.zero_grad()
    loss = step(batches[smp.dp_rank()]).reduce_mean()
    losses = [mean_square(whole(batch)) for batch in batches]
    torch.stack(losses).mean().backward()
    assert error(loss, losses[smp.dp_rank()].detach()) < 1e-12
    compare(model, whole, what)


def main() -> None:
    torch.set_default_dtype(torch.float64)
    for scenario in sys.argv[3:]:
        run(int(sys.argv[1]), int(sys.argv[2]), scenario)
        smp.shutdown()


def run(pipeline: int, tensor: int, scenario: str) -> None:
    smp.init(
        {
            "pipeline_parallel_degree": pipeline,
            "tensor_parallel_degree": tensor,
            "ddp": True,
            "microbatches": 2,
            "pipeline": scenario if scenario in ("simple", "looped", "zero_bubble") else "interleaved",
            "static_mode": scenario in ("static", "fast"),
            "fast_mode": scenario == "fast",
            "static_steps": 2,
        }
    )
    model = smp.DistributedModel(make(divided=True))
    whole = make(divided=False)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    reference = torch.optim.SGD(whole.parameters(), lr=0.1)
    if scenario == "delays":
        for block in model.module:
            block.delay = 0.01

    @smp.step
    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = (model(x) - y).square().mean()
        model.backward(loss)
        return loss

    # Ranks of one TP_GROUP have equally many batches; these are those of the group that has most.
    everybody, longest = list(range(smp.dp_size())), list(range(tensor))
    leaves_early = scenario == "joins" and smp.rdp_rank() == 1
    with model.join(enable=scenario == "joins"):
        for step in range(STEPS - 2 if leaves_early else STEPS):
            if scenario == "fails" and step == 2:
                fails(model, train, *data(step, smp.dp_rank()))
            optimizer.zero_grad()
            losses = train(*data(step, smp.dp_rank()))
            are_all_here = scenario != "joins" or step < STEPS - 2
            expected = whole_step(whole, reference, step, everybody if are_all_here else longest)
            assert error(losses.reduce_mean(), expected[smp.dp_rank()]) < 1e-12
            compare(model, whole, f"step {step}")
            optimizer.step()
            reference.step()
    owned = len(list(model.local_parameters()))
    if pipeline > 1:
        assert 0 < owned < len(list(whole.parameters())), "the pipeline has divided nothing"
    print(f"{scenario}: exact with {current_tensor_group().counts['reduce_scatter'].number} reduce-scatters")


def whole_step(
    whole: nn.Module, optimizer: torch.optim.Optimizer, step: int, present: list[int]
) -> dict[int, torch.Tensor]:
    """One process on the batches of all ranks that are left: the loss of each; gradients are over all of them."""
    optimizer.zero_grad()
    losses = {}
    for replica in present:
        x, y = data(step, replica)
        losses[replica] = (whole(x) - y).square().mean()
    (sum(losses.values(), torch.zeros(())) / smp.dp_size()).backward()
    return {replica: loss.detach() for replica, loss in losses.items()}


def fails(model: smp.DistributedModel, train: object, x: torch.Tensor, y: torch.Tensor) -> None:
    """One tp rank leaves a divided module out; every rank hears of it, and the next step is exact."""
    blocks = list(model.module)
    blocks[1].skips = smp.tp_rank() == 1
    try:
        train(x, y)  # type: ignore[operator]
    except (smp.ShardwrightError, smp.RemoteError) as problem:
        print("refused:", str(problem).partition("\n")[0])
    else:
        raise AssertionError("the step has succeeded")
    blocks[1].skips = False


if __name__ == "__main__":
    main()
