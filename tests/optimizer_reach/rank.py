"""One rank of a job that trains with optimizers that look at whole parameters, beside the same in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import shardwright as smp
import torch
from torch import nn

from tests.jobs.listed import run_listed

from .optimizers import OPTIMIZERS

MICROBATCHES = 2


@smp.step
def train(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    loss = (model(inputs) - 0.3).square().sum()
    model.backward(loss)
    return loss


def built(bias: bool) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 16, bias=bias), nn.Tanh(), nn.Linear(16, 12, bias=bias), nn.Tanh(), nn.Linear(12, 4, bias=bias)
    )


def batch(step: int, replica: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * step + replica))


class Pair:
    """A model over the ranks of the job, the last of whose layers is not divided, and the same in one process."""

    def __init__(self, name: str, bias: bool) -> None:
        self.bias, self.plain, module = bias, built(bias), built(bias)
        for layer in (module[0], module[2]):
            smp.set_tensor_parallelism(layer)
        self.model = smp.DistributedModel(module)
        self.reference = OPTIMIZERS[name](self.plain.parameters())
        self.optimizer: Any = smp.DistributedOptimizer(OPTIMIZERS[name](self.model.parameters()))

    def run(self, steps: int, first: int = 0) -> None:
        for step in range(first, first + steps):
            self.optimizer.zero_grad()
            self.reference.zero_grad()
            train(self.model, batch(step, smp.dp_rank()))
            for replica in range(smp.dp_size()):
                for part in batch(step, replica).chunk(MICROBATCHES):
                    ((self.plain(part) - 0.3).square().sum() / (MICROBATCHES * smp.dp_size())).backward()
            self.optimizer.step()
            self.reference.step()
            self.check(f"step {step}")

    def check(self, what: str) -> None:
        expected, found, first = self.plain.state_dict(), self.model.state_dict(), built(self.bias).state_dict()
        for name, value in expected.items():
            most = 1e-9 * float((value - first[name]).abs().max()) + 1e-13
            assert float((found[name] - value).abs().max()) <= most, f"{what}: {name}"


def exact(optimizer: str, bias: bool) -> None:
    """Weights are those of one process, and go on so from a state that was saved."""
    pair = Pair(optimizer, bias)
    pair.run(4)
    saved = copy.deepcopy(pair.optimizer.local_state_dict(gather_if_shard=False))
    values = {name: one.detach().clone() for name, one in pair.model.local_named_parameters()}
    plain = copy.deepcopy((pair.plain.state_dict(), pair.reference.state_dict()))
    pair.run(1, first=4)
    with torch.no_grad():
        for name, one in pair.model.local_named_parameters():
            one.copy_(values[name])
    pair.plain.load_state_dict(plain[0])
    pair.reference.load_state_dict(plain[1])
    pair.optimizer.load_state_dict(saved)
    pair.run(2, first=5)


def saved(optimizer: str, bias: bool, folder: str) -> None:
    """Training goes on from a checkpoint, which divides state of a parameter's shape and has other state whole."""
    pair = Pair(optimizer, bias)
    pair.run(3)
    smp.save_checkpoint(folder, tag="third", partial=True, model=pair.model, optimizer=pair.optimizer)
    plain = copy.deepcopy((pair.plain.state_dict(), pair.reference.state_dict()))
    pair.run(2, first=3)
    smp.resume_from_checkpoint(folder, tag="third", model=pair.model, optimizer=pair.optimizer)
    pair.plain.load_state_dict(plain[0])
    pair.reference.load_state_dict(plain[1])
    pair.run(2, first=5)


def refused(optimizer: str, bias: bool, words: str) -> None:
    """It is refused by its name, when it is wrapped or in its first step, on every rank."""
    with pytest.raises(smp.ConfigError, match=words):
        Pair(optimizer, bias).run(1)


def unwrapped(optimizer: str) -> None:
    """An optimizer that looks at whole parameters and is not wrapped is refused; one by element is not."""
    module = built(False)
    smp.set_tensor_parallelism(module[0])
    model = smp.DistributedModel(module)
    plain = OPTIMIZERS[optimizer](list(model.parameters()))
    train(model, batch(0, smp.dp_rank()))
    with pytest.raises(smp.ConfigError, match=r"wrap it, optimizer = smp.DistributedOptimizer\(optimizer\)"):
        plain.step()
    OPTIMIZERS["mine"](list(model.parameters())).step()


def early(optimizer: str, wraps: bool) -> None:
    """An optimizer from before the model was wrapped has the parameters of replaced modules: it is refused."""
    module = built(True)
    made: Any = OPTIMIZERS[optimizer](list(module.parameters()))
    smp.set_tensor_parallelism(module[0])
    model = smp.DistributedModel(module)
    train(model, batch(0, smp.dp_rank()))
    words = r"created before smp.DistributedModel.*: 2 of its parameters \('0.weight', '0.bias'\)"
    with pytest.raises(smp.ConfigError, match=words):
        smp.DistributedOptimizer(made) if wraps else made.step()
    kept: Any = OPTIMIZERS[optimizer](list(module[2].parameters()))
    (smp.DistributedOptimizer(kept) if wraps else kept).step()  # what was not replaced is the model's


CASES = {"exact": exact, "saved": saved, "refused": refused, "unwrapped": unwrapped, "early": early}


def run(case: dict[str, Any]) -> None:
    """Run what a configuration is to show, one after another in one job."""
    torch.set_default_dtype(torch.float64)
    smp.init({"microbatches": MICROBATCHES, "ddp": True, **case["config"]})
    for name, arguments in case["cases"]:
        try:
            CASES[name](**arguments)
        except BaseException as error:
            error.add_note(f"{name} {arguments}")
            raise
    smp.shutdown()


if __name__ == "__main__":
    run_listed(run)
