"""Long computations and debuggers trip nothing, and who waits for whom is reported."""

from __future__ import annotations

import json
import re

import pytest

from tests.jobs.job import Job, Process

#: Far less than what the ranks are made to wait.
TIMEOUTS = {"liveness_timeout_seconds": 1, "stall_timeout_seconds": 2, "stall_report_seconds": 1}
TOLERANCE = 1e-10
COMPUTING_SECONDS = 60.0


def job(scenario: str, **timeouts: float) -> Job:
    return Job("training", arguments=[scenario, json.dumps(TIMEOUTS | timeouts)])


def check_exact(done: Job) -> None:
    done.all_end_with([0, 0], COMPUTING_SECONDS)
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
        report_of(pair[0], number=1)
        pair[1].tell()
        check_exact(pair)


@pytest.mark.parametrize("where", ["in forward", "in backward", "between steps"])
def test_a_debugger_on_rank_0_stops_the_job_until_it_continues(where: str) -> None:
    with job(f"debug {where}") as pair:
        pair[0].event("blocked")
        pair[0].tell("p 'six times seven is', 6 * 7")
        report_of(pair[0], number=1)
        pair[0].tell("continue")
        check_exact(pair)
        assert "('six times seven is', 42)" in pair[0].out
        assert re.search(r"rank 0 at \S+/training\.py:\d+, in debug: ", pair[0].err)
        assert "StallError" not in "".join(process.err for process in pair.ranks)


def seconds_after(words: str, text: str) -> float:
    """The seconds that follow a pattern; a report is late where the machine has other things to do."""
    found = re.search(words + r" (\d+\.\d) s\b", text)
    assert found, f"no seconds after {words!r} in:\n{text}"
    return float(found[1])


def report_of(process: Process, number: int = 0) -> str:
    """The ``number``-th report of the job that a rank has logged; whole once the rank has ended."""

    def found() -> list[str]:
        return process.err.split("shardwright: a rank has been waiting for a long time; state of all ranks:\n")[1:]

    process.wait_for("report", lambda: len(found()) > number and "rank 1" in found()[number], 30)
    return found()[number]


def test_one_picture_shows_what_every_rank_does_waits_for_and_where_its_python_stands() -> None:
    with job("block in forward") as pair:
        pair[1].event("blocked")
        report_of(pair[0])
        pair[1].tell()
        pair.all_end_with([0, 0], COMPUTING_SECONDS)
        report = report_of(pair[0])
        assert "what every rank of the job does" not in pair[1].err
    assert len(report.splitlines()) + 1 < 20
    waits, computes = report.split("\nrank 1 at ")
    # What is first is a line of the user's code: that of microbatch 0, where it is not through both ranks yet.
    assert re.match(r"rank 0 at \S+/common\.py:\d+, in ", waits)
    assert re.search(
        r" at \S+/common\.py:\d+, in forward: hidden = self\.second\(hidden\)  "
        r"\[(.*; )?the step function, forward, microbatch 1 \(worker \d\)(; .*)?\]\n",
        waits,
    )
    assert "\n  step 3 (common.train): rank 0 on host " in waits
    # Microbatch 0 may have been through both ranks before the next one came.
    assert seconds_after(r"microbatch 1 \(worker \d\) has waited", waits) >= TIMEOUTS["stall_report_seconds"]
    assert "for rank 1 to answer request" in waits
    assert "(forward of second)" in waits
    assert "last heard: executing in step 3" in waits
    assert re.search(r"\n  also at \S+:\d+, in \w+: .*  \[the script\]", waits)
    # One worker may have served both microbatches.
    first, *further = computes.splitlines()
    assert re.search(r", in await_word: .*  \[module 'second', forward, microbatch 1 \(worker \d\)\]$", first)
    assert seconds_after(r"microbatch 1 \(worker \d\) has run forward of second for", further[0]) > 0.5


def test_a_rank_whose_interpreter_is_locked_is_in_the_picture_as_silent() -> None:
    with job("hold") as pair:
        pair.all_end_with([0, 0], COMPUTING_SECONDS)
        report = report_of(pair[0])
    assert "rank 1 did not answer within 3 s" in report
    assert "[last heard: executing in step 3" in report


def test_ranks_that_wait_for_each_other_end_with_a_stall() -> None:
    """Rank 1 waits at a barrier, rank 0 in the next step, which is seen long before the silence is too long."""
    with job("barrier", stall_timeout_seconds=COMPUTING_SECONDS) as pair:
        pair[1].event("step", number=1)
        pair.all_end_with([1, 1])
        for process in pair.ranks:
            assert "StallError" in process.err
            assert "rank 1 is in smp.barrier, and rank 0 is in step 3, which cannot end without rank 1" in process.err
            assert "ranks 0, 1 have to call smp.barrier" in process.err
        report = pair[0].err.partition("StallError")[2]
        assert "rank 1 has waited" in report
        assert "for rank 0 to come to smp.barrier" in report
        assert "for rank 1 to answer request" in report
        assert re.search(r"rank 1 at \S+/training\.py:\d+, in run: if self\.action\(\):  \[the script\]", report)
        assert len(report.partition("state of all ranks:\n")[2].partition("\n\n")[0].splitlines()) < 20
