"""Ranks that wait for one another raise within seconds, with what each of them does; slow ranks raise nothing."""

from __future__ import annotations

import re

import pytest

from tests.jobs.job import Job
from tests.jobs.patience import slowdown

#: A deadlock is found after about 3 s; the machine may have other things to do.
FOUND_SECONDS = 20.0


@pytest.mark.parametrize(
    ("scenario", "ranks"),
    [
        ("state dict of one rank", 4),
        ("step of one rank", 2),
        ("different groups", 2),
        ("receive in a circle", 4),
        ("receive in forward", 2),
    ],
)
def test_ranks_that_wait_for_one_another_raise_on_all_of_them(scenario: str, ranks: int) -> None:
    with Job("waiting", ranks, arguments=[scenario]) as job:
        job.all_end_with([1] * ranks, FOUND_SECONDS + 30)
        for process in job.ranks:
            raised = process.event("raised")
            assert raised["at"] - process.event("begins")["at"] < FOUND_SECONDS * slowdown()
            assert raised["kind"] in {"StallError", "RemoteError"}
            for rank in range(ranks):
                assert f"rank {rank} " in raised["text"], raised["text"]
            assert "waiting.py" in raised["text"], "no Python stack"


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_after_an_error_that_all_ranks_catch_everything_is_exact(ranks: int) -> None:
    with Job("waiting", ranks, arguments=["on after a stall"]) as job:
        job.all_end_with([0] * ranks, 120)
        for process in job.ranks:
            assert [raised["kind"] for raised in process.events("raised")] == ["StallError"] * 2
            assert [raised["kind"] for raised in process.events("raised again")] == ["StallError"] * (process is job[0])
            errors = [error for worst in process.events("worst") for error in worst["errors"]]
            assert len(errors) == 6
            assert max(errors) < 1e-10


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_come_to_different_calls_raise_on_all_of_them(ranks: int) -> None:
    with Job("waiting", ranks, arguments=["barrier meets a gather"]) as job:
        job.all_end_with([1] * ranks, 60)
        for process in job.ranks:
            raised = process.event("raised")
            # Whoever has seen it leaves, and says why.
            assert raised["kind"] in {"ShardwrightError", "PeerLostError"}, raised
            assert re.search(
                r"rank \d is in smp.(barrier|allgather) and rank \d in smp.(allgather|barrier)", raised["text"]
            )


def test_ranks_that_are_slow_raise_nothing() -> None:
    with Job("waiting", 4, arguments=["slow script", "slow module", "large objects", "late thread", "busy"]) as job:
        job.all_end_with([0] * 4, 120)
