"""Rank 0 says once how long steps take and what one rank alone would take, and where dividing does not pay."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from shardwright.speed.figures import Division, RankTime, speed_line

from tests.jobs.ranks import run_ranks

PROGRAM = """
import os, sys, time
import torch
import shardwright as smp

class Slow(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x):
        time.sleep(float(sys.argv[2]))
        return self.inner(x)

smp.init({"pipeline_parallel_degree": 2, "microbatches": int(sys.argv[3]), "ddp": os.environ["WORLD_SIZE"] == "4"})
model = smp.DistributedModel(torch.nn.Sequential(Slow(), Slow()))

@smp.step
def step(model, x):
    loss = model(x).mean()
    model.backward(loss)
    return loss

for _ in range(int(sys.argv[1])):
    step(model, torch.ones(8, 8))
"""


def lines_of(folder: Path, ranks: int, steps: int, seconds: float, microbatches: int = 4) -> list[list[str]]:
    script = folder / "program.py"
    script.write_text(PROGRAM)
    ended = run_ranks(script, str(steps), str(seconds), str(microbatches), ranks=ranks, folder=folder)
    assert [one.code for one in ended] == [0] * ranks, ended[0].err
    return [[line for line in one.err.splitlines() if "a step takes" in line] for one in ended]


def seconds(number: str, unit: str) -> float:
    return float(number) * (1.0 if unit == "s" else 1e-3)


def judged_by_its_numbers(line: str, replicas: int = 1) -> tuple[float, float]:
    """The seconds of a step and of one rank alone, of which the line's verdict has to be that of the numbers in it.

    An undivided model would be on as many replicas, each with its part of the batch.
    """
    found = re.search(r"a step takes ([\d.]+) (ms|s) on .* at most about ([\d.]+) (ms|s)", line)
    assert found, line
    step, alone = seconds(found[1], found[2]), seconds(found[3], found[4])
    rounding, work = 1.01, alone / replicas
    if work >= 1.25 * step * rounding:
        assert line.endswith(" times as long"), line
    elif work > step * rounding and work * rounding < 1.25 * step:
        assert "dividing this model hardly pays in time" in line, line
    elif work * rounding < step:
        assert "dividing this model does not pay in time" in line, line
    return step, alone


def test_it_is_said_once_on_rank_0_after_the_measured_steps(tmp_path: Path) -> None:
    first, second = lines_of(tmp_path, 2, 12, 0.02)
    assert second == []
    (line,) = first
    assert line.startswith("shardwright: rank 0: a step takes ")
    step, alone = judged_by_its_numbers(line)
    # Two modules that sleep, in four microbatches; how much longer they take, the machine's other work decides.
    assert alone >= 2 * 4 * 0.02
    assert step >= 5 * 0.02


def test_every_replica_counts(tmp_path: Path) -> None:
    first, *others = lines_of(tmp_path, 4, 8, 0.01)
    assert others == [[], [], []]
    (line,) = first
    assert "on 4 ranks" in line
    assert judged_by_its_numbers(line, replicas=2)[1] >= 2 * 2 * 4 * 0.01


def test_fewer_steps_say_nothing_and_a_toy_is_told_that_dividing_does_not_pay(tmp_path: Path) -> None:
    assert lines_of(tmp_path, 2, 7, 0.0) == [[], []]
    (line,), _ = lines_of(tmp_path, 2, 8, 0.01, microbatches=1)  # of which the second waits for the first
    judged_by_its_numbers(line)
    assert " pay" in line
    assert line.endswith("in time; if it fits in the memory of one rank, pipeline_parallel_degree 1 is better")


def test_the_numbers_are_means_over_ranks_and_sums_of_computing() -> None:
    two = Division(pipeline=2, tensor=1, microbatches=4)
    ranks = [RankTime(5, 10.0, 6.0, 3.0, 0.5), RankTime(5, 10.0, 8.0, 1.0, 0.5)]
    assert speed_line(ranks, two) == (
        "a step takes 2.00 s on 2 ranks, of which they compute 70%, wait 20%, move data 5% and need 5% for the rest; "
        "one rank alone would take at most about 2.80 s, 1.4 times as long"
    )
    even = [RankTime(5, 10.0, 6.0, 3.0, 0.5)] * 2
    assert "take at most about 2.40 s: dividing this model hardly pays in time" in speed_line(even, two)
    slow = [RankTime(5, 0.05, 0.01, 0.02, 0.01)] * 2
    assert "take at most about 4.0 ms: dividing this model does not pay in time" in speed_line(slow, two)


def test_where_dividing_does_not_pay_the_degree_that_is_fastest_is_named() -> None:
    toy = [RankTime(5, 5.0, 0.1, 4.0, 0.1)] * 4
    end = speed_line(toy, Division(4, 1, 4)).partition(": ")[2]
    assert end == (
        "dividing this model does not pay in time; if it fits in the memory of one rank, pipeline_parallel_degree 1 is "
        "better"
    )
    # Of 0.96 s that four ranks compute together: at degree 2 and with 8 microbatches 0.54 s, and one boundary.
    deep = [RankTime(5, 5.0, 1.2, 3.0, 0.1)] * 4
    busy = 0.96 / 4 * 11 / 8
    expected = 0.96 / 2 * 9 / 8 + (1.0 - busy) / 3
    assert Division(4, 1, 8).seconds(0.96, 1.0) == pytest.approx({1: 0.96, 2: expected})
    end = speed_line(deep, Division(4, 1, 8)).partition(": ")[2]
    assert end == (
        f"dividing this model does not pay in time; pipeline_parallel_degree 2 is better, with steps of about "
        f"{expected * 1e3:.1f} ms"
    )


def test_replicas_do_not_make_a_division_pay() -> None:
    """Two replicas of two ranks: an undivided model would compute its replica's part of the batch."""
    ranks = [RankTime(5, 5.0, 2.0, 2.0, 0.5)] * 4
    assert "one rank alone would take at most about 1.60 s: dividing this model does not pay" in speed_line(
        ranks, Division(2, 1, 4)
    )
    assert speed_line(ranks, Division(4, 1, 4)).endswith("1.60 s, 1.6 times as long")
    halves = Division(2, 2, 4)
    assert halves.seconds(1.6, 1.0) == {1: 0.8}
    assert speed_line(ranks, halves).endswith("1.60 s, 1.6 times as long")


@pytest.mark.parametrize("sending", [0.0, 0.5, 4.0])
def test_sending_is_not_counted_as_computing(sending: float) -> None:
    kinds = {f"{kind}_seconds": 0.5 for kind in ("forward", "backward", "weight", "other")}
    figures = {**kinds, "steps": 2, "seconds": 5.0, "waiting_seconds": {1: 0.5, 2: 1.0}, "sending_seconds": sending}
    time = RankTime.of(figures)
    assert time == (2, 5.0, max(2.0 - sending, 0.0), 1.5, sending)
    assert RankTime.of({**figures, "steps": 7, "seconds": 8.0}).since(time)[:2] == (5, 3.0)
