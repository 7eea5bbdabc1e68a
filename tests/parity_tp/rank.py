"""One rank of a job that runs cases one after another: ``python -m tests.parity_tp.rank KIND CASES RESULTS``."""

from __future__ import annotations

import functools
import json
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import shardwright as smp
import torch
from shardwright.delayed.materialise import is_delayed
from shardwright.tensor_parallel.group import current_tensor_group
from shardwright.tensor_parallel.module import ShardedTensors
from torch import nn

from tests.jobs.listed import write_rows
from tests.jobs.patience import HANG_SECONDS
from tests.parity.compare import Comparison
from tests.parity.table import row_of_failure

from .cases import TensorCase
from .precision import compute_in_double
from .problem import Problem
from .reference import LEARNING_RATE, Expected, Samples, renamed, start, train

#: A case that takes longer hangs; every thread's stack is then printed and the job ends.
CASE_SECONDS = HANG_SECONDS


@functools.lru_cache(maxsize=8)
def expected_of(samples: Samples) -> Expected:
    """What one process computes, rank 0 for all: the same for all modes with the same samples."""
    problem = problems()[samples.problem]
    if smp.rank():
        return Expected(start(problem), *smp.recv_from(0, smp.RankType.WORLD_RANK))
    expected = train(problem, samples)
    smp.broadcast((expected.losses, expected.gradients, expected.weights), smp.WORLD)
    return expected


@functools.lru_cache(maxsize=1)
def problems() -> dict[str, Problem]:
    """All problems; models only where they are asked for, since ``transformers`` takes seconds to import."""
    from . import modules

    if sys.argv[1] == "modules":
        return modules.PROBLEMS
    from . import models

    return {**modules.PROBLEMS, **models.PROBLEMS}


class RankRun:
    """One case on one rank, which holds what it owns against the whole model."""

    def __init__(self, case: TensorCase) -> None:
        self.case = case
        self.problem = problem = problems()[case.problem]
        self.comparison = Comparison()
        shared = case.batches in ("same", "prescaled")
        self.index = smp.rdp_rank() if shared else smp.dp_rank()
        number = case.rdp if shared else case.dp
        sizes = tuple(1 + (index + 1) % 3 for index in range(number)) if case.batches == "unequal" else (2,) * number
        self.samples = Samples(case.problem, sizes, case.microbatches)
        self.expected = expected_of(self.samples)
        self.model = smp.DistributedModel(self._delayed() if case.delayed else problem.divide(self.expected.start))
        if case.delayed:
            early = [name for name, parameter in self.model.named_parameters() if not is_delayed(parameter)]
            assert not early, f"parameters that have values before the model is divided: {early}"
        self._pin()
        self.replaced = {
            each.name: type(self.expected.start.get_submodule(each.name))
            for each in self.model.tensor_parallelism_report()
            if each.substitute is not None
        }
        self._check_replaced()
        self.optimizer = smp.DistributedOptimizer(torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE))

    def _delayed(self) -> nn.Module:
        with smp.delay_param_initialization():
            return start(self.problem)

    def _pin(self) -> None:
        if self.case.pp > 1:
            for name in self.problem.pins:
                smp.set_partition(self.model.module.get_submodule(name), 1)

    def _check_replaced(self) -> None:
        found = Counter(cls.__name__ for cls in self.replaced.values())
        wrong = {cls: found[cls] for cls, number in self.problem.replaced.items() if found[cls] != number}
        if wrong or not (found or self.problem.pins):
            self.comparison.fail(f"replaced are {dict(found)}, expected {dict(self.problem.replaced)}")

    def run(self) -> None:
        """Train, comparing every step."""
        model, problem = self.model, self.problem

        @smp.step
        def train_step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loss = problem.loss(model, batch)
            model.backward(loss)
            return loss

        for step, gradients in enumerate(self.expected.gradients):
            self.optimizer.zero_grad()
            losses = train_step(self.samples.batch(problem, step, self.index))
            for part, loss in enumerate(self.expected.losses[step][self.index]):
                self.comparison.tensor(losses.outputs[part].detach(), loss, 0.0, f"step {step}: loss {part}")
            found = {name: parameter.grad for name, parameter in model.local_named_parameters()}
            self._compare(found, gradients, f"step {step}: gradient")
            self.optimizer.step()
        weights = {name: parameter.detach() for name, parameter in model.local_named_parameters()}
        self._compare(weights, self.expected.weights, "final weight")
        self._check_owned(list(weights))

    def _compare(self, found: Any, values: Any, where: str) -> None:
        """Hold this rank's tensors against its parts of the whole ones."""
        group = current_tensor_group()
        whole = renamed(self.expected.start, values, self.replaced)
        shardings = ShardedTensors(self.model.module).by_name()
        parts = {
            name: shardings[name].shard(value, group.rank, group.size)
            if name in shardings and value is not None
            else value
            for name, value in whole.items()
        }
        for name, tensor in found.items():
            if tensor is None and name in shardings and parts[name] is not None:
                found[name] = torch.zeros_like(parts[name])
        place = f"pp rank {smp.pp_rank()}, tp rank {smp.tp_rank()}, {where}"
        self.comparison.gradients(found, parts, place)

    def _check_owned(self, names: list[str]) -> None:
        """Every parameter that this tp rank has a part of is owned by one pipeline rank."""
        owned = Counter(name for of in smp.allgather(names, smp.PP_GROUP) for name in of)
        all_names = {name for name, _ in self.model.module.named_parameters()}
        if set(owned) != all_names or any(number != 1 for number in owned.values()):
            self.comparison.fail(
                f"the pipeline owns {sorted(owned.items())}, expected each of {sorted(all_names)} once"
            )

    def row(self, seconds: float) -> dict[str, Any]:
        """What this rank tells."""
        sent = smp.stats()["server"]["total"]["sent"]
        counts = current_tensor_group().counts
        return {
            "case": self.case.name,
            "worst": self.comparison.worst,
            "where": self.comparison.where,
            "failures": self.comparison.failures,
            "stage": smp.pp_rank(),
            "parameters": sum(p.numel() for p in self.model.local_parameters()),
            "collectives": sum(count.number for count in counts.values()),
            "forward": sent["forward"],
            "backward": sent["backward"],
            "seconds": seconds,
        }


def configuration(case: TensorCase) -> dict[str, Any]:
    """What ``smp.init`` gets."""
    keys: dict[str, Any] = {
        "pipeline_parallel_degree": case.pp,
        "tensor_parallel_degree": case.tp,
        "microbatches": case.microbatches,
        "pipeline": case.schedule,
        "optimize": case.optimize,
        "prescaled_batch": case.batches == "prescaled",
        "ddp": True,
    }
    if problems()[case.problem].pins:
        keys |= {"auto_partition": False, "default_partition": 0}
    return keys


def run_case(case: TensorCase) -> dict[str, Any]:
    """Run one case in a job of its own within these processes; this rank's row."""
    started = time.monotonic()
    try:
        smp.init(configuration(case))
        run = RankRun(case)
        run.run()
        smp.barrier()
        row = run.row(time.monotonic() - started)
    except Exception as error:
        traceback.print_exc()
        row = row_of_failure(case.name, error)
    return row


def main() -> int:
    """Run the cases of a file, and write a row for each; end after one that raised, which may have left ranks apart."""
    compute_in_double()
    cases = [TensorCase(**fields) for fields in json.loads(Path(sys.argv[2]).read_text())]
    torch.set_num_threads(1)
    return write_rows(run_case, cases, CASE_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
