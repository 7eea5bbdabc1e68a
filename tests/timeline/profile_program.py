"""A rank of a job that profiles some of its steps, and prints what came of it as JSON.

usage: profile_program.py FOLDER JOB SCENARIO
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import shardwright as smp
import torch
from shardwright.errors import ShardwrightError
from torch import nn
from torch.profiler import ProfilerActivity

CPU = [ProfilerActivity.CPU]
#: Configurations.
JOBS: dict[str, dict[str, Any]] = {
    "pipeline": {"pipeline_parallel_degree": 2, "microbatches": 4},
    "one-microbatch": {"pipeline_parallel_degree": 2, "microbatches": 1},
    "alone": {"microbatches": 4},
    "replicas": {"ddp": True, "microbatches": 4},
    "sharded": {"ddp": True, "sharded_data_parallel_degree": 2, "microbatches": 1},
    "tensor": {"tensor_parallel_degree": 2, "ddp": True, "microbatches": 4},
}


@smp.step
def train_step(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    loss = model(inputs).square().mean()
    model.backward(loss)
    return loss


@smp.step
def profiling_step(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    with smp.profile(activities=CPU):
        return model(inputs).mean()


class Broken(Exception):
    pass


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ShardwrightError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def gradients(model: Any) -> dict[str, list[float]]:
    return {name: each.grad.flatten().tolist() for name, each in model.named_parameters() if each.grad is not None}


class Rank:
    def __init__(self, folder: Path, job: str) -> None:
        self.folder = folder
        self.found: dict[str, Any] = {}
        self.found["before init"] = refusal(lambda: smp.profile(activities=CPU))
        smp.init(JOBS[job])
        torch.manual_seed(3)
        with smp.tensor_parallelism(enabled=job == "tensor"):
            layers = [nn.Linear(16, 16) for _ in range(4)]
        self.model = smp.DistributedModel(nn.Sequential(*layers))
        self.run(2)

    def run(self, count: int) -> None:
        generator = torch.Generator().manual_seed(4)
        for _ in range(count):
            self.model.zero_grad()
            train_step(self.model, torch.randn(8, 16, generator=generator))

    def whole(self) -> None:
        """One block without a schedule, beside the same steps without it."""
        self.run(2)
        plain = gradients(self.model)
        with smp.profile(activities=CPU, record_shapes=True) as profiled:
            self.run(2)
        self.found["same"] = gradients(self.model) == plain
        self.found["num_gradients"] = len(plain)
        self.found["operators"] = sorted({event.key for event in profiled.key_averages()})
        profiled.export_chrome_trace(str(self.folder / "whole.json"))
        profiled.export_chrome_trace(str(self.folder / "whole.json.gz"))

    def cycles(self) -> None:
        ready: list[int] = []

        def write(profiled: smp.profile) -> None:
            ready.append(profiled.step_num)
            profiled.export_chrome_trace(str(self.folder / f"cycle_{profiled.step_num}.json"))

        schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=3)
        with smp.profile(activities=CPU, schedule=schedule, on_trace_ready=write) as profiled:
            for _ in range(14):
                self.run(1)
                profiled.step()
        self.found["ready"] = list(ready)
        straight = torch.profiler.schedule(wait=0, warmup=0, active=1)
        with smp.profile(activities=CPU, schedule=straight, on_trace_ready=write) as profiled:
            for _ in range(2):
                self.run(1)
                profiled.step()
        self.found["without a pause"] = ready[3:]

    def refusals(self) -> None:
        found = self.found
        with smp.profile(activities=CPU) as profiled:
            found["nested"] = refusal(lambda: smp.profile(activities=CPU).start())
            found["trace inside"] = refusal(lambda: smp.trace().__enter__())
            found["too early"] = refusal(lambda: profiled.export_chrome_trace(str(self.folder / "early.json")))
            self.run(1)
        with smp.trace():
            found["inside a trace"] = refusal(lambda: smp.profile(activities=CPU).start())
        found["in a step"] = refusal(lambda: profiling_step(self.model, torch.ones(8, 16)))
        found["memory"] = refusal(lambda: smp.profile(activities=CPU, profile_memory=True))
        found["no folder"] = refusal(lambda: profiled.export_chrome_trace(str(self.folder / "none" / "x.json")))
        with torch.profiler.profile(activities=CPU) if smp.rank() == 1 else contextlib.nullcontext():
            found["another profiler on rank 1"] = refusal(lambda: smp.profile(activities=CPU).start())
        with smp.profile(activities=CPU) as profiled:
            self.run(1)
        profiled.export_chrome_trace(str(self.folder / "after.json"))

    def left(self) -> None:
        """Blocks that an exception leaves: on all ranks, on one that goes on, and in what is called with a trace."""
        with contextlib.suppress(Broken), smp.profile(activities=CPU) as profiled:
            self.run(1)
            raise Broken
        self.found["nothing"] = refusal(lambda: profiled.export_chrome_trace(str(self.folder / "left.json")))

        def one_leaves() -> None:
            with contextlib.suppress(Broken), smp.profile(activities=CPU):
                self.run(1)
                if smp.rank() == 1:
                    raise Broken("of rank 1")

        self.found["one left"] = refusal(one_leaves)

        def fail(profiled: smp.profile) -> None:
            if smp.rank() == 1:
                raise Broken("in the handler")

        def handler_fails() -> None:
            with contextlib.suppress(Broken), smp.profile(activities=CPU, on_trace_ready=fail):
                self.run(1)

        self.found["handler"] = refusal(handler_fails)
        self.run(1)
        with smp.profile(activities=CPU) as profiled:
            self.run(1)
        profiled.export_chrome_trace(str(self.folder / "after.json"))

    def unwritable(self) -> None:
        """A rank that cannot take its trace."""

        def breaks() -> None:
            with smp.profile(activities=CPU) as profiled:
                self.run(1)
                if smp.rank() == 1:
                    assert profiled._folder is not None
                    profiled._folder.rmdir()

        self.found["rank 1 cannot"] = refusal(breaks)
        self.run(1)

    def plain(self) -> None:
        for _ in range(2):
            with torch.profiler.profile(activities=CPU):
                self.run(2)

    def memory(self) -> None:
        with smp.profile(activities=CPU, profile_memory=True, with_stack=True) as profiled:
            self.run(1)
        profiled.export_chrome_trace(str(self.folder / "memory.json"))

    def stacks(self) -> None:
        with smp.profile(activities=CPU, with_stack=True, with_flops=True, with_modules=True) as profiled:
            self.run(2)
        profiled.export_chrome_trace(str(self.folder / "stacks.json"))


def main() -> None:
    folder, job, scenario = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(name)s: %(message)s")
    rank = Rank(folder, job)
    getattr(rank, scenario)()
    print("found:", json.dumps(rank.found), flush=True)
    smp.shutdown()


if __name__ == "__main__":
    main()
