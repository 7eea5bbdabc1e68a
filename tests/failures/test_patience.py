"""Long computations and debuggers trip nothing, and who waits for whom is reported."""

from __future__ import annotations

import json

import pytest

from .job import Job

#: Far less than what the ranks are made to wait.
TIMEOUTS = {"liveness_timeout_seconds": 1, "stall_timeout_seconds": 2, "stall_report_seconds": 1}
TOLERANCE = 1e-10
COMPUTING_SECONDS = 60.0


def job(scenario: str) -> Job:
    return Job("training", arguments=[scenario, json.dumps(TIMEOUTS)])


def check_exact(done: Job) -> None:
    assert done.all_end(COMPUTING_SECONDS) == [0, 0]
    for process in done.ranks:
        errors = [step["error"] for step in process.events("step")]
        assert len(errors) == 4
        assert max(errors) < TOLERANCE


@pytest.mark.parametrize("scenario", ["hold", "compute", "compute between steps"])
def test_a_computation_longer_than_every_timeout_trips_nothing(scenario: str) -> None:
    """For 5 s C code runs, with the interpreter's lock held or released, in a task or between steps."""
    with job(scenario) as pair:
        pair[1].event("step", number=1)
        check_exact(pair)


@pytest.mark.parametrize("where", ["in forward", "between steps"])
def test_a_breakpoint_trips_nothing(where: str) -> None:
    """The rank waits for its standard input, as a debugger does, until the other has reported its wait twice."""
    with job(f"block {where}") as pair:
        pair[1].event("blocked")
        waiting = pair[0].wait_for("second report", lambda: "has waited 4." in pair[0].err, COMPUTING_SECONDS)
        assert waiting
        pair[1].tell()
        check_exact(pair)


def test_a_report_says_who_waits_for_whom_and_for_which_module() -> None:
    with job("block in forward") as pair:
        pair[1].event("blocked")
        report = pair[0].wait_for("report", lambda: [line for line in pair[0].err.splitlines() if "waited" in line], 30)
        pair[1].tell()
        assert pair.all_end(COMPUTING_SECONDS) == [0, 0]
    first = report[0]
    assert first.startswith("shardwright: step 3 (rig.train): rank 0 on host ")
    assert "microbatch 0 (worker 0) has waited 1." in first
    assert "for rank 1 to answer request" in first
    assert "(forward of second)" in first
    assert "last heard: executing in step 3" in first


def test_ranks_that_wait_for_each_other_end_with_a_stall() -> None:
    """Rank 1 waits at a barrier, rank 0 in the next step: nobody computes."""
    with job("barrier") as pair:
        pair[1].event("step", number=1)
        assert pair.all_end() == [1, 1]
        for process in pair.ranks:
            assert "StallError" in process.err
            assert "nothing in the job has made progress for 2." in process.err
        assert "rank 1 has waited 1." in pair[1].err
        assert "for an object from rank 0 on channel 'allgather WORLD'" in pair[1].err
        assert "for rank 1 to answer request" in pair[0].err
