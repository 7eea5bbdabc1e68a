"""All ranks of a pipeline get the batches that its first rank reads, once each, and its error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.ranks import outputs_of_ranks


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    outputs = outputs_of_ranks(Path(__file__).with_name("handed_on.py"))
    return [json.loads(one.splitlines()[-1]) for one in outputs]


def test_both_ranks_get_all_batches_in_each_epoch(found: list[dict[str, Any]]) -> None:
    batches = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [one["epochs"] for one in found] == [[batches, batches]] * 2


def test_an_epoch_that_is_broken_off_leaves_nothing_to_the_next(found: list[dict[str, Any]]) -> None:
    assert [one["broken off"] for one in found] == [[[[0, 1, 2, 3]], 25]] * 2


def test_ranks_get_none_where_batches_are_not_handed_on(found: list[dict[str, Any]]) -> None:
    assert [one["without"] for one in found] == [[[0, 1, 2, 3], [4, 5, 6, 7]], [None, None]]


def test_the_first_rank_is_two_batches_ahead_of_one_that_takes_none(found: list[dict[str, Any]]) -> None:
    assert found[0]["read ahead"] == 2
    assert [one["rest"] for one in found] == [98, 100]


def test_an_error_of_the_data_reaches_both_ranks(found: list[dict[str, Any]]) -> None:
    assert found[0]["failing"] == "ValueError: a row is not liked"
    assert found[1]["failing"].startswith("RemoteError: rank 0 on host ")
    assert "ValueError: a row is not liked" in found[1]["failing"]


def test_a_division_for_another_configuration_is_refused_on_both_ranks(found: list[dict[str, Any]]) -> None:
    words = "data set 'other' was divided for ranks [[0], [1]], each of which train on the same rows, and those of"
    assert all(one["other"].startswith(f"ConfigError: {words} this job are [[0, 1]]: give") for one in found), found
