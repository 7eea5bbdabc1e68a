"""Gradients are the mean over data-parallel ranks, whatever the ranks run."""

from pathlib import Path

from tests.jobs.ranks import outputs_of_ranks


def test_gradients_are_means_whatever_the_ranks_run():
    outputs = outputs_of_ranks(Path(__file__).with_name("two_ranks.py"))
    assert all("all scenarios hold" in output for output in outputs)


def test_a_step_that_reduces_nothing_fails_on_all_ranks_together():
    outputs = outputs_of_ranks(Path(__file__).with_name("failed_step.py"))
    assert all("exact after failures" in output for output in outputs)


def test_a_model_that_one_rank_has_let_go_of_is_missed_only_where_it_is_trained():
    outputs = outputs_of_ranks(Path(__file__).with_name("model_gone.py"))
    assert all("gone and done" in output for output in outputs)
