"""Replicas average sparse gradients, and keep them sparse."""

from pathlib import Path

from tests.jobs.ranks import outputs_of_ranks


def test_sparse_gradients_are_means_and_stay_sparse() -> None:
    outputs = outputs_of_ranks(Path(__file__).with_name("sparse_gradients.py"))
    assert outputs == ["exact\n", "exact\n"]
