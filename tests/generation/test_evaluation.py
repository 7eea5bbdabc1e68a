"""Generation in evaluations."""

from __future__ import annotations

from tests.jobs.listed import run_in_job


def test_predictions_are_those_of_one_process() -> None:
    run_in_job("tests.generation.rank", 2, [{"name": "predicts", "microbatches": number} for number in (1, 2)])
