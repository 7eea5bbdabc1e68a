"""A model of several parts, some of which keep something, over ranks and in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import shardwright as smp
import torch
from shardwright.job.runtime import Runtime, current_runtime
from shardwright.model.sentinel import is_sentinel
from torch import nn

from tests.frames.job import Job
from tests.state.keepers import kept

MICROBATCHES = 4
STEPS = 4
#: Rows of a microbatch, and width: a few numbers, and more than stay in a message.
SIZES = {"small": (2, 3), "large": (40, 160)}
SCHEDULES = ["simple", "interleaved", "looped", "zero_bubble"]
MODES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"static_mode": True, "static_steps": 1},
    "fast": {"static_mode": True, "fast_mode": True, "static_steps": 1},
}

#: Gradients and what modules keep after a step, and the step's outputs.
Found = list[dict[str, Any]]


def losses(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def called(model: Callable[[torch.Tensor], torch.Tensor], part: torch.Tensor, calls: int) -> torch.Tensor:
    """What a microbatch gives whose model is called so many times."""
    for _ in range(calls):
        part = model(part)
    return part


def alone(original: nn.Module, batches: list[torch.Tensor], calls: int = 1) -> Found:
    """What plain torch finds, one microbatch after another; each calls the model so many times."""
    model, found = copy.deepcopy(original), []
    for batch in batches:
        model.zero_grad()
        outputs = []
        for part in batch.chunk(MICROBATCHES):
            output = called(model, part, calls)
            outputs.append(output.detach().clone())
            losses(output).backward()
        used = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        gradients = {f"{name}.grad": gradient / MICROBATCHES for name, gradient in used.items()}
        found.append({"outputs": torch.cat(outputs), **gradients, **kept(model)})
    return found


def stepped(
    original: nn.Module, batches: list[torch.Tensor], place: Callable[[nn.Module], None], calls: int = 1
) -> tuple[Found, dict[str, Any]]:
    """What this rank finds of the divided model: gradients and state of its own part, and outputs."""
    module = copy.deepcopy(original)
    place(module)
    model = smp.DistributedModel(module)

    @smp.step
    def train(part: torch.Tensor) -> torch.Tensor:
        output = called(model, part, calls)
        model.backward(losses(output))
        return output

    found = []
    for batch in batches:
        model.zero_grad()
        outputs = train(batch).concat()
        gradients = {
            f"{name}.grad": p.grad.clone()
            for name, p in module.named_parameters()
            if not is_sentinel(p) and p.grad is not None
        }
        found.append({"outputs": outputs, **gradients, **kept(module)})
    assert model.placement.ownership is not None
    decision = model.placement.ownership.decision
    known = {"modules": decision.modules, "one_at_a_time": decision.one_at_a_time}
    return found, {"steps": current_runtime().step.number, **known}


def places_of(original: nn.Module, ranks: dict[str, int]) -> Callable[[nn.Module], None]:
    """Places modules by name."""

    def place(module: nn.Module) -> None:
        for name, rank in ranks.items():
            smp.set_partition(module.get_submodule(name), rank)

    return place


def check(
    job: Job,
    model: nn.Module,
    ranks: dict[str, int],
    settings: dict[str, Any],
    size: str = "small",
    steps: int = STEPS,
    calls: int = 1,
    *,
    joined: bool = False,
) -> list[dict[str, Any]]:
    """Compare a model over ranks with the same model in one process, after every step.

    Where modules are joined with those that are placed, the partition says where they are.
    """
    torch.manual_seed(11)
    rows, width = SIZES[size]
    model = model.double()
    batches = [torch.randn(rows * MICROBATCHES, width, dtype=torch.float64) for _ in range(steps)]
    expected = alone(model, batches, calls)

    def main(runtime: Runtime) -> tuple[Found, dict[str, Any]]:
        return stepped(model, batches, places_of(model, ranks), calls)

    given = {"auto_partition": False, "default_partition": 0, "microbatches": MICROBATCHES, **settings}
    results = job.run(main, given)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    assert job.rests
    owner = dict(results[0][1]["modules"]) if joined else owners(model, ranks)
    compare(expected, [found for found, _ in results], owner)
    return [stats for _, stats in results]


def owners(model: nn.Module, ranks: dict[str, int]) -> dict[str, int]:
    """The rank of each module, by name: its own, or that of the module around it."""
    found: dict[str, int] = {}
    for name, _ in model.named_modules():
        parent = name.rpartition(".")[0]
        found[name] = ranks.get(name, found.get(parent, 0) if name else ranks.get("", 0))
    return found


def compare(expected: Found, results: list[Found], owner: dict[str, int]) -> None:
    """Raise for the first thing that a rank finds otherwise; each part is asked of the rank that runs it."""
    for step, wanted in enumerate(expected):
        for name, value in wanted.items():
            module = name.removesuffix(".grad").rpartition(".")[0]
            found = results[owner.get(module, 0)][step]
            assert name in found, f"{name} in step {step}"
            same(found[name], value, f"{name} in step {step}")


def same(found: Any, wanted: Any, what: str) -> None:
    if isinstance(wanted, torch.Tensor):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12, msg=lambda text: f"{what}: {text}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), what
        for one, other in zip(found, wanted, strict=True):
            same(one, other, what)
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), what
        for key, value in wanted.items():
            same(found[key], value, f"{what}.{key}")
    elif isinstance(wanted, float):
        assert abs(found - wanted) <= 1e-10 * max(1.0, abs(wanted)), f"{what}: {found} and not {wanted}"
    else:
        assert found == wanted, f"{what}: {found} and not {wanted}"
