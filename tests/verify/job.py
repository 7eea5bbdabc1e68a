"""One rank of a job that runs scenarios in turn and prints what came of each: ``job.py PP DP RANDOM NAME...``."""

from __future__ import annotations

import gc
import json
import random
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import shardwright as smp
import torch
from shardwright.job.runtime import current_runtime
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.verify.models import CASES, Case

MICROBATCHES = 4


class Training:
    """A case on this rank: model, optimizer, step function and batches."""

    def __init__(self, case: Case, dtype: torch.dtype = torch.float64, **options: Any) -> None:
        torch.manual_seed(11)
        torch.set_default_dtype(dtype)
        self.case = case
        self.model = smp.DistributedModel(case.build(), **options)
        for path, pp_rank in case.pins.items() if smp.pp_size() > 1 else ():
            smp.set_partition(self.model.module.get_submodule(path), pp_rank)
        self.optimizer = smp.DistributedOptimizer(torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9))
        self.step = smp.step(case.body)

    def batch(self, number: int) -> tuple[Any, ...]:
        return self.case.batch(torch.Generator().manual_seed(100 * number + smp.dp_rank()))

    def train(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.step(self.model, *self.batch(number))
        self.optimizer.step()

    def verify(self, number: int = 0, **options: Any) -> smp.verify.Report:
        return smp.verify(self.step, self.model, *self.batch(number), **options)

    def child(self, path: str) -> nn.Module | None:
        """A module, on the rank that owns it."""
        ownership = self.model.placement.ownership
        return self.model.module.get_submodule(path) if ownership is None or ownership.is_local(path) else None


def described(report: Any) -> dict[str, Any]:
    departure = report.first_departure
    return {
        **report.summary(),
        "text": str(report),
        "what": "" if departure is None else departure.what,
        "departure_error": None if departure is None else departure.error,
        "microbatch": None if departure is None else departure.microbatch,
        "rank": None if departure is None else departure.rank,
        "failed_names": sorted({f"{row.kind} {row.name}" for row in report.failed}),
        "kinds": sorted({row.kind for row in report.rows}),
    }


SCENARIOS: dict[str, Callable[[], Any]] = {}


def scenario(function: Callable[[], Any]) -> Callable[[], Any]:
    SCENARIOS[function.__name__] = function
    return function


def clean(name: str, dtype: torch.dtype = torch.float64) -> Callable[[], Any]:
    def run() -> list[dict[str, Any]]:
        training = Training(CASES[name], dtype)
        first = described(training.verify())
        training.train(1)
        return [first, described(training.verify(2))]

    return run


for name in CASES:
    SCENARIOS[f"clean {name}"] = clean(name)
SCENARIOS["clean GPT-2 in float32"] = clean("GPT-2", torch.float32)


class Scaled(torch.autograd.Function):
    """Passes values on, and gradients scaled by 1.001."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 1.001


def faulty(name: str, path: str, plant: Callable[[nn.Module], object]) -> Callable[[], Any]:
    """Trains a step, plants a fault where the module lives, and verifies."""

    def run() -> dict[str, Any]:
        training = Training(CASES[name])
        training.train(0)
        child = training.child(path)
        if child is not None:
            plant(child)
        return described(training.verify(1, whole_batch=False))

    return run


def hook_weight(child: nn.Module) -> None:
    child.weight.register_hook(lambda gradient: gradient * 1.001)


def hook_input(child: nn.Module) -> None:
    child.register_full_backward_hook(lambda _, inputs, __: tuple(gradient * 1.001 for gradient in inputs))


def scale_output(child: nn.Module) -> None:
    forward = child.forward
    child.forward = lambda value: Scaled.apply(forward(value))


def detach_output(child: nn.Module) -> None:
    forward = child.forward
    child.forward = lambda value: forward(value).detach()


def detach_input(child: nn.Module) -> None:
    forward = child.forward
    child.forward = lambda value: forward(value.detach())


def repeat_first_microbatch(child: nn.Module) -> None:
    forward, kept = child.forward, []

    def swapped(value: torch.Tensor) -> torch.Tensor:
        kept.append(value.detach())
        return forward(value if len(kept) == 1 else value * 0 + kept[0])

    child.forward = swapped


def untie(child: nn.Module) -> None:
    child.weight = nn.Parameter(child.weight.detach().clone())


def draw(child: nn.Module) -> None:
    forward = child.forward
    child.forward = lambda value: forward(value) + random.random()


SCENARIOS |= {
    "scaled weight": faulty("chain", "branch", hook_weight),
    "scaled input of third": faulty("chain", "third", hook_input),
    "scaled input of second": faulty("chain", "second", hook_input),
    "scaled output of a module without parameters": faulty("chain with dropout", "drop", scale_output),
    "scaled output": faulty("chain", "second", scale_output),
    "scaled in GPT-2": faulty("GPT-2", "transformer.h.2.mlp.c_fc", scale_output),
    "detached output": faulty("chain", "branch", detach_output),
    "detached input": faulty("chain", "third", detach_input),
    "swapped microbatch": faulty("chain", "third", repeat_first_microbatch),
    "untied": faulty("tied", "words.head", untie),
}


@scenario
def fault_on_rank_0() -> dict[str, Any]:
    """A copy of the model has the fault too; one that is built anew has not."""
    training = Training(CASES["chain"])
    training.train(0)
    child = training.child("act")
    if child is not None:
        scale_output(child)
    copied = training.verify(1)
    rebuilt = training.verify(1, reference=CASES["chain"].build)
    return {"copied": described(copied), "rebuilt": described(rebuilt)}


@scenario
def random_numbers_of_python() -> dict[str, Any]:
    training = Training(CASES["chain"])
    random.seed(smp.rank())

    def build() -> nn.Module:
        module = CASES["chain"].build()
        draw(module.third)
        return module

    training.train(0)
    child = training.child("third")
    if child is not None:
        draw(child)
    return described(training.verify(1, reference=build))


def left_alone(name: str) -> Callable[[], Any]:
    """Trains twice, once with verifications in between; everything must be as without."""

    def run() -> dict[str, Any]:
        ends = []
        for verifies in (False, True):
            training = Training(CASES[name])
            random.seed(5)
            step = current_runtime().step  # as a new job's, since random numbers depend on its counts
            step.apart, step.trained, step.looked = step.number, 0, 0
            before = smp.state.step
            draws = []
            reports = []
            for number in range(3):
                if verifies:
                    reports.append(training.verify(7).exact)
                training.train(number)
                if verifies:  # now there are gradients too
                    reports.append(training.verify(8).exact)
                draws += [torch.rand(()).item(), random.random()]
            state = {
                **{f"weight {name}": value for name, value in training.model.local_state_dict().items()},
                **{f"gradient {name}": p.grad for name, p in training.model.local_named_parameters()},
                **{
                    f"momentum {number}": state["momentum_buffer"]
                    for number, state in enumerate(training.optimizer.state.values())
                },
                "draws": torch.tensor(draws),
                "steps": torch.tensor(smp.state.step - before),
            }
            ends.append({key: value for key, value in state.items() if isinstance(value, torch.Tensor)})
            attributes = sorted(
                (path, key) for path, module in training.model.local_named_modules() for key in vars(module)
            )
            ends[-1]["attributes"] = torch.tensor([len(attributes)])
            del training
            gc.collect()
        plain, verified = ends
        different = [key for key in plain if not torch.equal(plain[key], verified[key])]
        return {
            "different": different,
            "compared": len(plain),
            "reports": reports,
            "keys": plain.keys() == verified.keys(),
        }

    return run


SCENARIOS |= {f"left alone {name}": left_alone(name) for name in ("chain with dropout", "CNN", "counting")}


@scenario
def evaluation() -> dict[str, Any]:
    training = Training(CASES["CNN"])
    training.train(0)
    training.model.eval()

    @smp.step
    def evaluate(model: Any, inputs: torch.Tensor, labels: torch.Tensor) -> Any:
        return model(inputs)

    with torch.no_grad():
        return described(smp.verify(evaluate, training.model, *training.batch(1)))


@scenario
def refusals() -> dict[str, str]:
    training = Training(CASES["chain"])
    training.train(0)
    found = {}

    def attempt(name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    attempt("plain function", lambda: smp.verify(CASES["chain"].body, training.model, *training.batch(0)))
    attempt("tolerance", lambda: training.verify(tolerance=-1.0))
    attempt("other model", lambda: training.verify(reference=lambda: nn.Linear(2, 2)))
    attempt("no module", lambda: training.verify(reference=lambda: []))
    child = training.child("third")
    if child is not None:
        scale_output(child)
    attempt("difference", lambda: training.verify(raise_on_difference=True))
    found["lenient"] = str(training.verify(tolerance=0.1).exact)
    return found


def main() -> None:
    pp, dp, reproducible, *names = sys.argv[1:]
    smp.init(
        {
            "pipeline_parallel_degree": int(pp),
            "microbatches": MICROBATCHES,
            "ddp": int(dp) > 1,
            "reproducible_rng": reproducible == "reproducible",
            "auto_partition": False,
            "default_partition": 0,
        }
    )
    for name in names:
        try:
            outcome = SCENARIOS[name]()
        except Exception as error:
            outcome = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        print(json.dumps({"scenario": name, "outcome": outcome}), flush=True)
        gc.collect()  # the next scenario's model is the only one


if __name__ == "__main__":
    main()
