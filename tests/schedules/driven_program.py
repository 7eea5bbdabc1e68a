"""A rank of a job whose steps a list, a program or measurements order; prints what came of it as JSON.

usage: driven_program.py CASES, a JSON object of cases by name, run one after another.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import sys
import time
from pathlib import Path
from typing import Any

import shardwright as smp
import torch
from shardwright.command import main as main_of_command
from shardwright.errors import RemoteError, ShardwrightError
from shardwright.job.runtime import current_runtime
from shardwright.scheduling import Scheduling
from torch import nn

WIDTH = 6


class Blocks(nn.Module):
    """Modules that are called one by one: each call of another rank is a request of its own."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def whole_model(case: dict[str, Any]) -> nn.Module:
    torch.manual_seed(3)
    layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in case["places"]])
    for index in case.get("frozen", []):
        layers[index].requires_grad_(False)
    return Blocks(layers) if case.get("blocks") else nn.Sequential(layers)


def run(case: dict[str, Any]) -> dict[str, Any]:
    smp.init({"auto_partition": False, "default_partition": 0, "stall_report_seconds": 3.0, **case["keys"]})
    microbatches = case["keys"]["microbatches"]
    if "splits" in case:
        scheduling = current_runtime()[Scheduling]
        scheduling._on_trial, scheduling._splits = False, case["splits"][smp.pp_rank()]
    whole = whole_model(case)
    split = copy.deepcopy(whole)
    layers = split.layers if isinstance(split, Blocks) else split[0]
    for layer, place in zip(layers, case["places"], strict=True):
        smp.set_partition(layer, place)
    model = smp.DistributedModel(split)
    without_backward = case.get("without_backward", [])

    step = 0

    @smp.step
    def train(inputs: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        loss = model(inputs).square().sum()
        if step in case.get("failing", []) and int(numbers[0]) == 1:
            raise ValueError("this step fails")
        if int(numbers[0]) not in without_backward:
            model.backward(loss)
        return loss

    @smp.step
    def evaluate(inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(inputs).sum()

    worst, records = 0.0, []
    generator = torch.Generator().manual_seed(1)
    for step in range(case["steps"]):
        batch = torch.randn(2 * microbatches, WIDTH, generator=generator)
        numbers = torch.arange(microbatches).repeat_interleave(2)
        for parameter in [*whole.parameters(), *model.local_parameters()]:
            parameter.grad = None
        if step in case.get("failing", []):
            with contextlib.suppress(ValueError, RemoteError):
                train(batch, numbers)
            continue
        last = step == case["steps"] - 1
        with smp.trace(case.get("trace") if last else None) as traced:
            train(batch, numbers)
        records = [] if traced.timeline is None else traced.timeline.records()
        for number, part in enumerate(batch.chunk(microbatches)):
            loss = whole(part).square().sum()
            if number not in without_backward:
                (loss / microbatches).backward()
        expected = dict(whole.named_parameters())
        for name, parameter in model.local_named_parameters():
            other = expected[name].grad
            assert (parameter.grad is None) == (other is None), name
            if parameter.grad is not None and other is not None:
                worst = max(worst, float((parameter.grad - other).abs().max() / other.abs().max()))
    for _ in range(case.get("evaluations", 0)):
        evaluate(torch.randn(2 * microbatches, WIDTH, generator=generator))
    if "trace" in case and smp.rank() == 0:
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            assert main_of_command(["trace", "program", case["trace"]]) == 0
        Path(case["trace"], "program.txt").write_text(text.getvalue())
    stats = smp.stats()
    smp.barrier()
    return {
        "worst": worst,
        "records": [[r["rank"], r["kind"], r["phase"], r["microbatch"], r["start_ns"]] for r in records],
        "schedule": stats["schedule"],
        "decision": stats["schedule_decision"],
        "report": smp.report()["schedules"],
        "live": stats["server"]["live_requests"] + stats["live_frames"],
    }


def main() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    found = {}
    for name, case in json.loads(sys.argv[1]).items():
        started = time.monotonic()
        try:
            found[name] = run(case)
        except ShardwrightError as error:
            found[name] = {
                "error": f"{type(error).__name__}: {error}",
                "seconds": time.monotonic() - started,
            }
        smp.shutdown()
    print("found:", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
