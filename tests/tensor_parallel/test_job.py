"""Tensor parallelism with pipelines and data parallelism: exact, in one order, and with an error where ranks part."""

from pathlib import Path

import pytest

from tests.jobs.ranks import outputs_of_ranks

PROGRAM = Path(__file__).with_name("job.py")
SCHEDULES = ("delays", "looped", "zero_bubble", "static", "fast")


@pytest.mark.parametrize(
    ("ranks", "pipeline", "scenarios", "own"),
    [
        (2, 1, ("plain", "fails"), "DistributedLinear '2.divided'"),
        (4, 1, ("plain", "joins"), ""),
        (4, 2, (*SCHEDULES, "fails"), "calls forward of Sequential"),
    ],
)
def test_every_step_is_that_of_one_process(ranks: int, pipeline: int, scenarios: tuple[str, ...], own: str) -> None:
    """Whatever the schedule and the delays; ranks that take other branches are told where, and go on exactly."""
    for output in outputs_of_ranks(PROGRAM, str(pipeline), "2", *scenarios, ranks=ranks):
        lines = output.splitlines()
        assert [line.partition(":")[0] for line in lines if ": exact with" in line] == list(scenarios)
        refused = [line for line in lines if line.startswith("refused: ")]
        assert len(refused) == scenarios.count("fails")
        for line in refused:
            assert "DistributedLinear '1.divided'" in line
            assert own in line
