"""One rank of a job whose optimizers change more than weights, beside the same in one process."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import shardwright as smp
import torch
from torch import nn

from tests.jobs.listed import run_listed
from tests.optimizer_offloading.problems import small_chunks

from .changes import CHANGES, optimizer_with

STEPS = 3


class Net(nn.Module):
    """Layers of which one is never used, and one has fewer rows than some ranks need."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.second = nn.Linear(4, 6), nn.Linear(4, 4), nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))  # type: ignore[no-any-return]


@smp.step
def train(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(inputs) - 0.3).square().mean()
    model.backward(loss)
    return loss


def groups_of(module: Any) -> list[dict[str, Any]]:
    """Two groups, by names: a rank may lack parameters."""
    named = list(module.named_parameters())
    every = [
        [one for name, one in named if name.startswith(("first", "unused")) == is_first] for is_first in (True, False)
    ]
    return [{"params": each} for each in every]


def kept(optimizer: Any) -> dict[str, Any]:
    """What an optimizer has besides parameters and their state."""
    groups = [{key: one for key, one in group.items() if key not in ("params",)} for group in optimizer.param_groups]
    named = {key: dict(one) for key, one in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    return {"groups": groups, "state": named, "count": vars(optimizer).get("count")}


def compared(change: str, where: str, zeroes: bool, config: dict[str, Any]) -> str:
    """Train in both ways, and say how the results differ, or by which words it is refused."""
    small_chunks(300)
    smp.init({"microbatches": 1, **config})
    torch.manual_seed(0)
    module, plain = Net(), Net()
    plain.load_state_dict(module.state_dict())
    if config.get("tensor_parallel_degree"):
        for layer in (module.first, module.unused):
            smp.set_tensor_parallelism(layer)
    made = CHANGES[change]
    try:
        model = smp.DistributedModel(module)
        reference = optimizer_with(made, where, groups_of(plain))
        try:
            optimizer: Any = smp.DistributedOptimizer(optimizer_with(made, where, groups_of(model)))
            for step in range(STEPS):
                inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
                train(model, inputs.chunk(smp.dp_size())[smp.dp_rank()])
                optimizer.step()
                (plain(inputs) - 0.3).square().mean().backward()
                reference.step()
                if zeroes:
                    optimizer.zero_grad()
                    reference.zero_grad()
        except (smp.ConfigError, smp.RemoteError, smp.PartialUpdateError) as error:
            return f"refused: {error}"
        whole = model.state_dict()
        for key, value in plain.state_dict().items():
            if float((whole[key] - value).abs().max()) > 1e-12:
                return f"WRONG: {key} by {float((whole[key] - value).abs().max())}"
        return "exact" if kept(optimizer) == kept(reference) else f"WRONG: {kept(optimizer)} {kept(reference)}"
    finally:
        smp.shutdown()


def run(case: dict[str, Any]) -> None:
    """Compare, and say what came out."""
    torch.set_default_dtype(torch.float64)
    logging.getLogger("shardwright").setLevel(logging.ERROR)
    sys.stdout.write(json.dumps({**case, "found": compared(**case)}) + "\n")


if __name__ == "__main__":
    run_listed(run)
