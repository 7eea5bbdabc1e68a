"""A rank that dies, freezes or leaves: every other rank ends in seconds and says which rank, where, and why."""

from __future__ import annotations

import json
import re
import signal
from typing import Any

import pytest

from tests.jobs.job import Job, Process

#: How long a frozen rank may stay silent in these tests.
LIVENESS = {"liveness_timeout_seconds": 2}


def job(scenario: str, ranks: int = 2, **keys: Any) -> Job:
    return Job("training", ranks, [scenario, json.dumps({"ddp": ranks > 2, **keys})])


def last_line(process: Process) -> str:
    """The exception that ended a process, without torchrun's prefix."""
    lines = [line for line in process.err.splitlines() if "PeerLostError: rank" in line]
    assert lines, process.err
    return lines[-1].partition("PeerLostError: ")[2]


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_rank_killed_in_a_step(phase: str) -> None:
    with job(f"block in first {phase}") as pair:
        pair[1].event("blocked")
        pair[1].signal(signal.SIGKILL)
        pair.all_end_with([1, -signal.SIGKILL])
        text = last_line(pair[0])
    assert text.startswith("rank 1 on host ")
    assert "rank 1 died" in text
    if phase == "forward":  # nothing shows that it had entered the step
        assert "nothing has been heard from it in this step" in text
        assert re.search(r'forward of "second" in microbatch \d was asked of it', text)
    else:
        assert "backward, of module 'second', in microbatch " in text


def test_a_rank_killed_in_a_step_ends_the_other_replica_too() -> None:
    with job("block in forward", ranks=4) as replicas:
        replicas[3].event("blocked")
        replicas[3].signal(signal.SIGKILL)
        replicas.all_end_with([1, 1, 1, -signal.SIGKILL])
        for rank in (0, 1, 2):
            assert last_line(replicas[rank]).startswith("rank 3 on host ")


def test_a_rank_killed_between_steps() -> None:
    with job("block between steps") as pair:
        pair[1].event("blocked")
        pair[1].signal(signal.SIGKILL)
        pair.all_end_with([1, -signal.SIGKILL])
        text = last_line(pair[0])
    assert "rank 1 died" in text
    assert "of module" not in text  # of which it never heard


def test_a_rank_killed_while_gradients_are_finished_is_named_although_whoever_missed_it_has_left() -> None:
    # The partner of its reduction catches the error and ends, and the others wait for that partner.
    with Job("dying", 4) as replicas:
        replicas.all_end_with([0, 0, -signal.SIGKILL, 0])
        for rank in (0, 1, 3):
            assert replicas[rank].event("lost")["rank"] == 2, rank


@pytest.mark.parametrize("where", ["in forward", "between steps"])
def test_a_frozen_rank(where: str) -> None:
    with job(f"block {where}", **LIVENESS) as pair:
        pair[1].event("blocked")
        pair[1].signal(signal.SIGSTOP)
        pair.all_end_with([1], but=[1])
        assert "rank 1 has been silent for 2 s: it is frozen or unreachable" in last_line(pair[0])


def test_a_frozen_rank_ends_the_other_replica_too_although_collectives_are_under_way() -> None:
    with job("block in forward", ranks=4, **LIVENESS) as replicas:
        replicas[3].event("blocked")
        replicas[3].signal(signal.SIGSTOP)
        replicas.all_end_with([1, 1, 1], but=[3])
        for rank in (0, 1, 2):
            # By its own watch, or by the words of the rank that failed the step for it.
            assert "rank 3 has been silent" in last_line(replicas[rank])


@pytest.mark.parametrize(("scenario", "code"), [("leave", 0), ("exit 3", 3)])
def test_a_rank_that_leaves_the_loop_early(scenario: str, code: int) -> None:
    with job(scenario) as pair:
        pair[1].event("step", number=1)
        pair.all_end_with([1, code])
        assert "rank 1 has left the job; step 3 (common.train) needs it" in last_line(pair[0])
        assert pair[1].err == ""


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_whose_own_code_fails_between_steps_hands_its_traceback_to_the_others(ranks: int) -> None:
    with job("lose data", ranks=ranks) as failing:
        failing[ranks - 1].event("step", number=1)
        failing.all_end_with([1] * ranks)
        for rank in range(ranks - 1):
            text = failing[rank].err
            left = f"rank {ranks - 1} has left the job after an error: OSError: shard 7 of the data is missing"
            assert left in text
            assert "in lose_the_data" in text
