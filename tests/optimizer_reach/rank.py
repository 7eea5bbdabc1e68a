"""One rank of a job that trains with optimizers that look at whole parameters, beside the same in one process."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.model.translation import as_in_one_process
from torch import nn

from tests.jobs.listed import run_listed
from tests.parity_tp.models import PROBLEMS

from .optimizers import OPTIMIZERS

MICROBATCHES = 2


@smp.step
def train(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    loss = (model(inputs) - 0.3).square().sum()
    model.backward(loss)
    return loss


def built(bias: bool, outputs: int = 4) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 16, bias=bias),
        nn.Tanh(),
        nn.Linear(16, 12, bias=bias),
        nn.Tanh(),
        nn.Linear(12, outputs, bias=bias),
    )


def batch(step: int, replica: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * step + replica))


class Pair:
    """A model over the ranks of the job, the last of whose layers is not divided, and the same in one process."""

    def __init__(self, name: str, bias: bool, outputs: int = 4) -> None:
        self.plain, module = built(bias, outputs), built(bias, outputs)
        self.first = copy.deepcopy(self.plain.state_dict())
        for number, (one, other) in enumerate(zip(self.plain.parameters(), module.parameters(), strict=True)):
            one.scaled_by = other.scaled_by = float(number % 2)  # type: ignore[attr-defined]
        for layer in (module[0], module[2 if outputs == 4 else 4]) if smp.tp_size() > 1 else ():
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
        expected, found, first = self.plain.state_dict(), self.model.state_dict(), self.first
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


def hidden(optimizer: str, bias: bool) -> None:
    """What a rule turns to later, for large tensors, by options or by attributes, is exact too."""
    pair = Pair(optimizer, bias)
    pair.run(4)
    for each in (pair.optimizer, pair.reference):
        for group in each.param_groups:
            group["trust"] = 3.0
    pair.run(8, first=4)


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


def narrow(optimizer: str, outputs: int) -> None:
    """A layer of whose rows a rank has one: its part has the shape of statistics of columns, which are whole."""
    pair = Pair(optimizer, bias=True, outputs=outputs)
    pair.run(2)
    saved = copy.deepcopy(pair.optimizer.local_state_dict())
    if smp.tp_size() == 1:
        assert not any(isinstance(one, dict) for state in saved["state"].values() for one in state.values())
        pair.reference.load_state_dict(pair.optimizer.state_dict())
    pair.optimizer.load_state_dict(saved)
    pair.run(2, first=2)
    with pytest.raises(RuntimeError, match="state_dict for Sequential:"):
        pair.model.load_state_dict({})


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


def replaced(optimizer: str) -> None:
    """What is put in the place of ``step`` calls the one before, or is refused by its name."""
    pair = Pair(optimizer, bias=True)
    calls: list[str] = []
    torch.optim.lr_scheduler.ConstantLR(pair.optimizer, factor=1.0)
    counted = pair.optimizer.step

    def timed(*args: Any) -> Any:
        calls.append("function")
        return counted(*args)

    pair.optimizer.step = timed
    pair.run(2)
    watched = pair.optimizer.step
    pair.optimizer.step = counted
    pair.optimizer.step = watched
    assert pair.optimizer.step is watched, "what is put back again and again does not grow"
    pair.optimizer.step = counted
    own = type(pair.optimizer).step
    pair.optimizer.step = own.__get__(pair.optimizer)

    def method(self: Any, *args: Any) -> Any:
        calls.append("method")
        return own(self, *args)

    pair.optimizer.step = types.MethodType(method, pair.optimizer)
    torch.optim.lr_scheduler.ConstantLR(pair.optimizer, factor=1.0)
    pair.run(2, first=2)
    assert calls == ["function"] * 2 + ["method"] * 2

    made = OPTIMIZERS[optimizer](pair.model.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(made, factor=1.0)
    assert scheduler.optimizer is smp.DistributedOptimizer(made)
    for wraps in (False, True):
        early: Any = OPTIMIZERS[optimizer](pair.model.parameters())
        early.step = types.MethodType(lambda self: type(self).step(self), early)
        if wraps:
            torch.optim.lr_scheduler.ConstantLR(early, factor=1.0)
        with pytest.raises(smp.ConfigError, match="whose step was replaced by"):
            smp.DistributedOptimizer(early)

    def instead() -> None:
        for group in pair.optimizer.param_groups:
            for one in group["params"]:
                one.data.sub_(one.grad if one.grad is not None else 0.0)

    train(pair.model, batch(4, smp.dp_rank()))
    pair.optimizer.step = instead
    with pytest.raises(smp.ConfigError, match=r"replaced\.<locals>\.instead.*has not called the step that it replaced"):
        pair.optimizer.step()
    with pytest.raises((smp.PartialUpdateError, smp.RemoteError), match="has not called the step"):
        train(pair.model, batch(5, smp.dp_rank()))


@smp.step
def train_text(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    model.backward(loss)
    return loss


def of_weights(optimizers: list[str], folder: str) -> None:
    """Where query, key and value became one weight, an update is that of each by itself, also after a load."""
    problem = PROBLEMS["BERT"]
    for name in optimizers:
        torch.manual_seed(1)
        plain = problem.whole()
        module = problem.divide(plain)
        with torch.no_grad():
            for key, one in plain.named_parameters():
                one.mul_(5.0 if "query" in key else 0.2 if "key" in key else 1.0)
        module.load_state_dict(plain.state_dict())
        for (key, one), other in zip(plain.named_parameters(), module.parameters(), strict=True):
            one.scaled_by = other.scaled_by = 2.0 if "query" in key else 0.0 if "key" in key else 0.5
        first = copy.deepcopy(plain.state_dict())
        reference = OPTIMIZERS[name](plain.parameters())
        model = smp.DistributedModel(module)
        optimizer: Any = smp.DistributedOptimizer(OPTIMIZERS[name](model.parameters()))
        for step in range(4):
            if step == 2:
                smp.save_checkpoint(folder, tag=name, partial=True, model=model, optimizer=optimizer)
                smp.resume_from_checkpoint(folder, tag=name, model=model, optimizer=optimizer)
            optimizer.zero_grad()
            reference.zero_grad()
            train_text(model, problem.batch(4, torch.Generator().manual_seed(100 * step + smp.dp_rank())))
            for replica in range(smp.dp_size()):
                every = problem.batch(4, torch.Generator().manual_seed(100 * step + replica))
                for part in range(MICROBATCHES):
                    each = {key: value.chunk(MICROBATCHES)[part] for key, value in every.items()}
                    (plain(**each).loss / (MICROBATCHES * smp.dp_size())).backward()
            optimizer.step()
            reference.step()
            found = as_in_one_process(model.module, model.state_dict())
            for key, value in plain.state_dict().items():
                if key.endswith("key.bias"):
                    continue  # attention does not depend on it: its gradient is rounding, of which norms make an update
                most = 1e-7 * float((value - first[key]).abs().max()) + 1e-12
                assert float((found[key] - value).abs().max()) <= most, f"{name}, step {step}: {key}"


CASES = {
    "exact": exact,
    "hidden": hidden,
    "replaced": replaced,
    "of_weights": of_weights,
    "saved": saved,
    "refused": refused,
    "narrow": narrow,
    "unwrapped": unwrapped,
    "early": early,
}


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
