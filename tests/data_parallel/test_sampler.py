"""Samples are divided over pipelines and not over processes, and ranks that were given other batches are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from shardwright.step.batches import fingerprints

from tests.jobs.ranks import Ended, run_ranks

PROGRAM = Path(__file__).with_name("sampled_ranks.py")


@pytest.fixture(scope="module")
def ranks() -> list[Ended]:
    ended = run_ranks(PROGRAM, ranks=4)
    assert [rank.code for rank in ended] == [0] * 4, ended
    return ended


@pytest.fixture(scope="module")
def found(ranks: list[Ended]) -> dict[tuple[int, int], dict[str, Any]]:
    rows = [json.loads(rank.out.splitlines()[-1]) for rank in ranks]
    return {(row["dp_rank"], row["pp_rank"]): row for row in rows}


def test_ranks_of_a_pipeline_get_the_same_samples_and_pipelines_different_ones(found: dict[Any, Any]) -> None:
    for dp_rank in (0, 1):
        assert found[dp_rank, 0]["epochs"] == found[dp_rank, 1]["epochs"]
    for first, second in zip(found[0, 0]["epochs"], found[1, 0]["epochs"], strict=True):
        assert sorted(first + second) == list(range(24))
    assert found[0, 0]["epochs"][0] != found[0, 0]["epochs"][1]
    assert found[0, 0]["state"] == {"epoch": 1, "taken": 12, "seed": 3}


def test_a_loaded_state_goes_on_where_it_was_once(found: dict[Any, Any]) -> None:
    for row in found.values():
        assert row["first"] + row["rest"] == row["restarted"] == row["epochs"][0]


def test_a_rank_that_was_given_another_batch_says_so_once_and_nobody_else_does(ranks: list[Ended]) -> None:
    for ended in ranks:
        told = [line for line in ended.err.splitlines() if "Ranks of a pipeline have to be given the same" in line]
        assert len(told) == json.loads(ended.out.splitlines()[-1])["pp_rank"]
        for line in told:
            assert "train_on_others): inputs differs on rank" in line
            assert "smp.dp_rank()" in line


def test_batches_are_told_apart_by_shape_dtype_and_values() -> None:
    long = torch.arange(100_000.0)
    changed = long.clone()
    changed[:98] += 1
    batches = [long, changed, long.view(2, -1), long.double(), long[:-1], {"x": [long, changed]}, torch.empty(0)]
    found = [fingerprints([("batch", batch)])["batch"] for batch in batches]
    assert len(set(found)) == len(found)
    assert fingerprints([("batch", long.clone())]) == fingerprints([("batch", long)])
    strange = [None, 3, torch.nn.Linear(2, 2), torch.ones(2, device="meta"), torch.eye(2).to_sparse()]
    assert fingerprints(("batch", value) for value in strange) == {}
    views = [torch.ones(2, 3).mT, torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2, requires_grad=True)]
    assert all(fingerprints([("batch", view)]) for view in views)
    assert fingerprints([("batch", torch.ones(2, dtype=torch.bfloat16))])
