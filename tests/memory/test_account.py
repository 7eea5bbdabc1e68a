"""``smp.memory_report`` over real ranks: what is predicted, beside what is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import shardwright as smp
import torch
from torch import nn

from tests.frames.job import Job as InProcessJob
from tests.frames.job import job_fixture
from tests.jobs.job import Job
from tests.jobs.patience import HANG_SECONDS
from tests.jobs.ranks import outputs_of_ranks

PROGRAM = Path(__file__).with_name("program.py")
#: Of one rank: two blocks of two linear layers, with biases, in float32.
PARAMETERS = 2 * 4 * (2 * 256 * 1024 + 1024 + 256)
#: Of one microbatch of 1024 rows on one rank: the hidden tensor of 4 KiB a row, relu's result, and results of 1 KiB.
MICROBATCH = 1024 * 2 * (4096 + 1024)
job = job_fixture(2)


def report_of(output: str) -> list[dict[str, Any]]:
    line = next(line for line in output.splitlines() if line.startswith("found: "))
    found: list[dict[str, Any]] = json.loads(line.removeprefix("found: "))
    return found


@pytest.mark.parametrize(("schedule", "in_flight"), [("simple", [4, 4]), ("interleaved", [4, 2])])
def test_predicted_and_measured_bytes_of_each_rank(schedule: str, in_flight: list[int]) -> None:
    environment = {"MKL_DISABLE_FAST_MM": "1"}  # else 4.5 MB for each thread that has multiplied: workers, by chance
    # Started as a script is: MKL of ranks that are forked has read its settings before.
    with Job(str(PROGRAM.with_suffix("")), 2, [schedule, "4"], lambda _: environment, prefix=lambda _: []) as processes:
        processes.all_end_with([0, 0], HANG_SECONDS)
        outputs = [process.out for process in processes.ranks]
    ranks = report_of(outputs[0])
    assert ranks == report_of(outputs[1])
    assert [rank["rank"] for rank in ranks] == [rank["pp_rank"] for rank in ranks] == [0, 1]
    assert [rank["in_flight"] for rank in ranks] == in_flight
    for rank in ranks:
        predicted, measured = rank["predicted"], rank["measured"]
        assert measured["parameters"] == predicted["parameters"] == PARAMETERS
        assert measured["gradients"] == predicted["gradients"] == PARAMETERS
        assert predicted["optimizer_state"] == 2 * PARAMETERS
        assert 2 * PARAMETERS <= measured["optimizer_state"] <= 2 * PARAMETERS + 8 * 4  # the numbers of updates
        assert predicted["buffers"] == measured["buffers"] == 0
        assert predicted["activations"] == pytest.approx(rank["in_flight"] * MICROBATCH, rel=0.35)
        # A rank that is ahead may have fewer in flight, and tensors on their way between ranks are there too.
        assert MICROBATCH / 2 < measured["activations"] < 4.6 * MICROBATCH
        assert measured["communication"] > 0
        assert rank["peak"] >= rank["resident"] > sum(measured[name] for name in ("parameters", "optimizer_state"))
        saves = {setting: nbytes for setting, nbytes, _ in rank["advice"]}
        assert any("set_activation_checkpointing" in setting for setting in saves)


def test_activations_follow_what_is_in_flight() -> None:
    all_of_them, one = (
        report_of(outputs_of_ranks(PROGRAM, schedule, active, ranks=2)[0])
        for schedule, active in (("simple", "4"), ("interleaved", "1"))
    )
    for many, few in zip(all_of_them, one, strict=True):
        assert few["predicted"]["activations"] * 4 == many["predicted"]["activations"]
        assert few["measured"]["activations"] * 2 < many["measured"]["activations"]


def test_a_single_rank_measures_its_backward() -> None:
    smp.init()
    try:
        torch.manual_seed(0)
        model = smp.DistributedModel(nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 64)))
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), momentum=0.9))

        @smp.step
        def train(x: torch.Tensor) -> None:
            model.backward(model(x).sum())

        assert smp.memory_report()[0]["measured"]["activations"] is None
        train(torch.randn(4096, 64))
        optimizer.step()
        (own,) = smp.memory_report()
        hidden = 4096 * 1024 * 4
        assert hidden <= own["measured"]["activations"] < 3 * hidden
        assert own["measured"]["optimizer_state"] == own["predicted"]["optimizer_state"]
        assert own["predicted"]["activations"] is None  # nothing was traced
    finally:
        smp.shutdown()


def test_an_unknown_optimizer_is_not_predicted(job: InProcessJob) -> None:
    class Own(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad)

    def main(runtime: Any) -> list[dict[str, Any]]:
        model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        smp.DistributedOptimizer(Own(model.parameters(), {}))
        return smp.memory_report()

    for ranks in job.run(main, {}):
        assert [rank["predicted"]["optimizer_state"] for rank in ranks] == [None, None]
