"""A call that all ranks have to make, made by some: an error that says what to write, and a word about who is slow."""

from __future__ import annotations

import re

import pytest

from tests.jobs.job import Job
from tests.jobs.patience import slowdown

#: It is found after about a second; the machine may have other things to do.
FOUND_SECONDS = 20.0
ADVICE = r"have to call smp\.save_checkpoint: write it outside of `if smp\.rank\(\) == 0:` and the like"


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("scenario", ["save of one rank", "save of the last rank"])
def test_a_save_of_one_rank_is_told_from_a_slow_one(scenario: str, ranks: int) -> None:
    """While a thread of the script runs, too, which hides it from the proof that all ranks wait."""
    saver = 0 if scenario == "save of one rank" else ranks - 1
    with Job("waiting", ranks, arguments=[scenario]) as job:
        job.all_end_with([1] * ranks, FOUND_SECONDS + 30)
        raised = job[saver].event("raised")
        assert raised["at"] - job[saver].event("begins")["at"] < FOUND_SECONDS * slowdown()
        assert raised["kind"] == "StallError"
        assert re.search(
            rf"rank {saver} is in smp\.save_checkpoint, and rank \d is in step 2, .*{ADVICE}", raised["text"]
        )
        for process in job.ranks:
            assert process.event("raised")["kind"] in {"StallError", "RemoteError", "PeerLostError"}


def test_ranks_in_two_calls_that_wait_for_each_other_raise() -> None:
    with Job("waiting", 2, arguments=["save meets a state dict"]) as job:
        job.all_end_with([1, 1], FOUND_SECONDS + 30)
        texts = [process.event("raised")["text"] for process in job.ranks]
        assert any("is in state_dict" in text and "smp.save_checkpoint" in text for text in texts), texts


def test_a_save_that_nobody_else_can_join_any_more_raises() -> None:
    with Job("waiting", 2, arguments=["save at the end"]) as job:
        job.all_end_with([1, 0], FOUND_SECONDS + 30)
        raised = job[0].event("raised")
        assert raised["kind"] == "PeerLostError"
        assert re.search(ADVICE, " ".join(raised["notes"])), raised


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_slow_rank_is_named_and_waited_for(ranks: int) -> None:
    with Job("waiting", ranks, arguments=["slow evaluation"]) as job:
        job.all_end_with([0] * ranks, 120)
        warned = re.findall(
            r"rank 0 has waited \d s in smp\.allgather for (rank \d) \(at (\S+):\d+, in (\w+)\)", job[0].err
        )
        assert len(warned) == 2, job[0].err
        for rank, file, function in warned:
            assert (rank, function) == ("rank 1", "wait")
            assert file.endswith("waiting.py")
        for process in job.ranks[1:]:
            assert "in smp.allgather for" not in process.err


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_after_a_lone_call_that_all_ranks_catch_everything_is_exact(ranks: int) -> None:
    with Job("waiting", ranks, arguments=["on after a lone save"]) as job:
        job.all_end_with([0] * ranks, 120)
        for process in job.ranks:
            assert len(process.events("raised")) == 2
            assert len(process.events("raised again")) == 2 * (process is job[0])
            errors = [error for worst in process.events("worst") for error in worst["errors"]]
            assert len(errors) == 4
            assert max(errors) < 1e-10
