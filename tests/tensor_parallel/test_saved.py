"""Distributed modules in a whole job: clipped, trained, averaged, saved and loaded as one process does it."""

from pathlib import Path

import pytest

from tests.jobs.ranks import outputs_of_ranks

PROGRAM = Path(__file__).with_name("saved.py")


@pytest.mark.parametrize(
    ("ranks", "pipeline", "optimize", "prescaled"),
    [
        (2, 1, "speed", False),
        (4, 2, "memory", True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(4, 2, "speed", False), (4, 1, "memory", True)]),
    ],
)
def test_a_job_with_distributed_modules_is_one_process(
    ranks: int, pipeline: int, optimize: str, prescaled: bool
) -> None:
    outputs = outputs_of_ranks(PROGRAM, str(pipeline), "2", optimize, str(int(prescaled)), ranks=ranks)
    assert all(output.endswith("saved\n") for output in outputs)


def test_averages_over_pipeline_and_tensor_parallelism_are_those_of_one_process() -> None:
    for output in outputs_of_ranks(PROGRAM.with_name("averaged.py"), ranks=4):
        assert output == "averaged\n" * 3


@pytest.mark.parametrize(("ranks", "pipeline"), [(2, 1), (4, 2)])
def test_state_dicts_have_divided_modules_whole_under_all_their_names(ranks: int, pipeline: int) -> None:
    assert outputs_of_ranks(PROGRAM.with_name("reused.py"), str(pipeline), ranks=ranks) == ["saved\n"] * ranks
