"""A process group that the script makes with torch says who a rank is, or contradicts the launcher on all ranks."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.forked import Forked
from tests.jobs.patience import HANG_SECONDS

PROGRAM = Path(__file__).with_name("own_group.py")


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each of two processes that no launcher started said of each start."""
    folder = tmp_path_factory.mktemp("groups")
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    processes = [
        Forked([PROGRAM, str(rank), str(folder)], clean, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in (0, 1)
    ]
    said: dict[str, list[dict[str, Any]]] = {}
    try:
        for process in processes:
            out, errors = process.communicate(timeout=HANG_SECONDS)
            assert process.returncode == 0, errors[-4000:]
            for line in out.splitlines():
                found = json.loads(line)
                said.setdefault(found.pop("name"), []).append(found)
    finally:
        for process in processes:
            process.kill()
    return said


@pytest.mark.parametrize("name", ["replicas", "pipeline", "as a launcher of one", "as lightning", "known to one rank"])
def test_a_rank_is_who_the_group_says(starts: dict[str, list[dict[str, Any]]], name: str) -> None:
    assert [each.get("place") for each in starts[name]] == [[0, 2, 0, 2], [1, 2, 1, 2]], starts[name]
    # Rank 0's sample is 0 and rank 1's is 1, whose gradient of 2 is half of the mean: weights go from 1 to .75. All
    # samples of the pipeline are 0.
    assert [each["weights"] for each in starts[name]] == [[1.0, 1.0] if name == "pipeline" else [0.75, 0.75]] * 2


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        (
            "contradicted on one rank",
            "JobStartError",
            "rank 1 of the process group: the environment variables",
        ),
        ("another back end", "ConfigError", "NCCL is asked for"),
        ("group after", "ConfigError", "after smp.init"),
    ],
)
def test_what_contradicts_the_group_is_refused_on_both_ranks(
    starts: dict[str, list[dict[str, Any]]], name: str, error: str, words: str
) -> None:
    assert [each.get("error") for each in starts[name]] == [error] * 2, starts[name]
    assert all(words in each["text"] for each in starts[name]), starts[name]


def test_a_rank_that_does_not_start_is_named(starts: dict[str, list[dict[str, Any]]]) -> None:
    first, second = starts["not called"]
    assert second == {"waited": True}
    assert "waited 2 s for ranks 1 of the process group" in first["text"]
