"""A batch's loss over ranks is that of plain ``transformers.Trainer``: of one process or, of a replica's rows, DDP."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.ranks import outputs_of_ranks
from tests.trainers.losses import LOSSES
from tests.trainers.runs import ROOT

#: Losses are logged in float32.
LOGGED = 1e-6

JOBS = {
    "pp2 of 1 microbatch": (2, {"pipeline_parallel_degree": 2, "microbatches": 1}),
    "pp2 of 4 microbatches": (2, {"pipeline_parallel_degree": 2, "microbatches": 4}),
    "dp2": (2, {"ddp": True, "microbatches": 1}),
    "dp2 of 2 microbatches": (2, {"ddp": True, "microbatches": 2}),
    "pp2 x dp2": (4, {"pipeline_parallel_degree": 2, "ddp": True, "microbatches": 2}),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("losses")
    outputs_of_ranks("-m", "tests.trainers.losses_rank", folder, "1", ranks=0, folder=ROOT)
    outputs_of_ranks("-m", "tests.trainers.losses_rank", folder, "2", ranks=2, folder=ROOT)
    return folder


#: What others show too.
_SLOW = {"pp2 of 1 microbatch", "dp2 of 2 microbatches"}


@pytest.mark.parametrize("job", [pytest.param(job, marks=pytest.mark.slow) if job in _SLOW else job for job in JOBS])
def test_losses_are_those_of_the_batch(job: str, plain: Path) -> None:
    ranks, config = JOBS[job]
    outputs = outputs_of_ranks("-m", "tests.trainers.losses_rank", plain, json.dumps(config), ranks=ranks, folder=ROOT)
    told = [json.loads(one.splitlines()[-1]) for one in outputs]
    for name, streams in (one for each in told for one in each["streams"].items()):
        for (rows, loss), (all_rows, expected) in zip(streams["ours"], streams["plain"], strict=True):
            assert rows == all_rows
            assert loss == pytest.approx(expected, rel=LOGGED), f"{name}: a stream of {all_rows} rows"
    reports: list[dict[str, Any]] = [one["losses"] for one in told]
    wrong = {
        f"{name} on rank {rank}": one
        for rank, report in enumerate(reports)
        for name, one in report.items()
        if not (one["loss"] <= LOGGED and one["weights"] <= LOSSES[name].rounding)
    }
    assert not wrong, json.dumps(wrong, indent=1)
    exact = {name: one["warned"] for name, one in reports[0].items() if LOSSES[name].adds_up}
    assert not {name: warned for name, warned in exact.items() if warned and LOSSES[name].answers}
    for warned in (one["warned"] for name, one in reports[0].items() if not LOSSES[name].adds_up):
        assert len(warned) == (config["microbatches"] > 1), warned
        for text in warned:
            found = re.search(r"together is (\S+), and their losses make (\S+), (\S+) of it apart", text)
            assert found is not None, text
            together, made, away = map(float, found.groups())
            assert abs(made - together) / abs(together) == pytest.approx(away, rel=0.1)
            assert away > 1e-5
            assert "each batch runs in one microbatch" in text
            assert "\n" not in text
    unasked = {name: warned for name, warned in exact.items() if not LOSSES[name].answers}
    if job != "pp2 of 1 microbatch":  # where there is nothing to ask
        for (text,) in unasked.values():
            assert "could not be asked: " in text
            assert "this loss is of training only" in text
    assert not any(one["warned"] for report in reports[1:] for one in report.values()), "ranks other than 0 warned"


def test_a_job_with_a_pipeline_that_is_not_used_says_so_once() -> None:
    outputs = outputs_of_ranks("-m", "tests.trainers.plain_loop", ranks=2, folder=ROOT)
    first, second = (json.loads(output.splitlines()[-1]) for output in outputs)
    assert len(first) == len(second) == 4
    for loop, texts in first.items():
        assert len(texts) == 1, loop
        assert "pipeline_parallel_degree is 2" in texts[0]
        assert "shardwright.huggingface" in texts[0]
    assert not any(second.values())


def test_accelerate_goes_on_with_the_order_of_samples_in_another_process(tmp_path: Path) -> None:
    whole, resumed = (
        json.loads(
            outputs_of_ranks("-m", "tests.trainers.accelerate_order", tmp_path, number, ranks=2, folder=ROOT)[
                0
            ].splitlines()[-1]
        )
        for number in ("0", "1")
    )
    assert resumed == whole
